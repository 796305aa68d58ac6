// deepinfer_ops._C: what is not an operator. Build information, the active CPU kernels, the record formats.
#include <pybind11/pybind11.h>

#include <string>

#include "kernels.h"

namespace py = pybind11;

namespace {

template <class Record>
py::dict describe() {
  py::dict entry;
  entry["dim"] = Record::kDim;
  entry["group"] = Record::kGroup;
  entry["data_bytes"] = Record::kDataBytes;
  entry["scale_bytes"] = Record::kScaleBytes;
  entry["bytes"] = Record::kBytes;
  return entry;
}

py::dict record_formats() {
  py::dict formats;
  formats["kv_fp8"] = describe<deepinfer::KvFp8>();
  formats["kv_fp4"] = describe<deepinfer::KvFp4>();
  formats["index_fp8"] = describe<deepinfer::IndexFp8>();
  formats["index_fp4"] = describe<deepinfer::IndexFp4>();
  return formats;
}

py::list cpu_capabilities() {
  py::list names;
  for (const char* const* name = deepinfer::capabilities(); *name != nullptr; ++name) names.append(*name);
  return names;
}

void set_cpu_capability(const std::string& name) {
  if (deepinfer::set_capability(name.c_str())) return;
  throw py::value_error("cpu capability: expected one of " + std::string(py::str(cpu_capabilities())) + ", got " +
                        name);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information and CPU capability of deepinfer_ops.";
  m.def("cpu_capability", [] { return deepinfer::kernels().name; }, "Name of the CPU kernels in use.");
  m.def("cpu_capabilities", &cpu_capabilities, "Names of the CPU kernels this machine can run, best first.");
  m.def("set_cpu_capability", &set_cpu_capability, py::arg("name"),
        "Use these CPU kernels from the next call on; ValueError if the machine cannot run them.");
  m.def("record_formats", &record_formats, "The record formats as compiled.");
  m.def(
      "build_info",
      [] {
        py::dict info;
        info["version"] = DEEPINFER_VERSION;
        info["compiler"] = DEEPINFER_COMPILER;
        info["built_with_torch"] = DEEPINFER_TORCH_VERSION;
        info["minimum_torch"] = "2.10";
        return info;
      },
      "Version, compiler, and the torch headers this was built with.");
}
