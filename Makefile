# Everything runs in .venv, which the first target that needs it creates. PYTHON picks the interpreter (>= 3.10), TORCH the
# torch to install: any release from 2.10 on.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)

SOURCES := CMakeLists.txt setup.py pyproject.toml $(wildcard csrc/*.h csrc/*.cpp csrc/isa/*.cpp)
CXX_FILES := $(wildcard csrc/*.h csrc/*.cpp csrc/isa/*.cpp)

.PHONY: demo test test-capabilities test-wide test-sanitizers lint fix bench clean

demo: $(VENV)/built  ## one decode step of a DeepSeek-V4-Flash layer, with a needle to find
	python -m deepinfer_ops.demo

test: $(VENV)/built $(VENV)/test-tools  ## the whole test suite (HYPOTHESIS_PROFILE=ci draws more problems)
	python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

OPERATOR_TESTS := tests/test_flash_mla_decode.py tests/test_paged_mqa_logits.py tests/test_softmax_pool.py \
  tests/test_decode_exhaustive.py

test-capabilities: $(VENV)/built $(VENV)/test-tools  ## the operators' tests on every instruction set of this CPU
	for capability in $$(python -c "from deepinfer_ops import _C; print(*_C.cpu_capabilities()[1:])"); do \
	  DEEPINFER_CPU_CAPABILITY=$$capability python -m pytest -n $(WORKERS) $(OPERATOR_TESTS) || exit 1; \
	done

test-wide: $(VENV)/built $(VENV)/test-tools  ## the same at AVX-512's vector width, in portable code
	cmake -S . -B build/wide -G Ninja -DDEEPINFER_TEST_WIDE=ON -DPython_EXECUTABLE=$$(command -v python)
	cmake --build build/wide --target deepinfer_ops
	DEEPINFER_LIBRARY=build/wide/libdeepinfer_ops.so DEEPINFER_CPU_CAPABILITY=wide python -m pytest -n $(WORKERS) $(OPERATOR_TESTS)

test-sanitizers: $(VENV)/built $(VENV)/test-tools  ## the operators' tests under AddressSanitizer and UBSan (g++)
	cmake -S . -B build/sanitize -G Ninja -DDEEPINFER_SANITIZE=address,undefined -DPython_EXECUTABLE=$$(command -v python)
	cmake --build build/sanitize --target deepinfer_ops
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 DEEPINFER_LIBRARY=build/sanitize/libdeepinfer_ops.so \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  python -m pytest $(OPERATOR_TESTS) tests/test_flash_mla_decode_bad_data.py tests/test_paged_mqa_logits_bad_data.py

lint: $(VENV)/lint-tools $(VENV)/built $(VENV)/test-tools  ## ruff, mypy --strict, clang-format
	ruff check .
	ruff format --check .
	mypy
	clang-format --dry-run --Werror $(CXX_FILES)

fix: $(VENV)/lint-tools  ## what `lint` can repair by itself
	ruff check --fix .
	ruff format .
	clang-format -i $(CXX_FILES)

bench: $(VENV)/built  ## ratios against torch compositions and the machine's own GEMM
	python -m benchmarks

clean:
	rm -rf $(VENV) build deepinfer_ops.egg-info deepinfer_ops/*.so

# torch and the build tools come first: the extension is built against the torch it will run with, not an isolated copy.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	pip install --quiet "$(TORCH)" "setuptools>=77" wheel "cmake>=3.24" ninja "pybind11>=2.12"
	touch $@

$(VENV)/built: $(VENV)/torch $(SOURCES)
	pip install --quiet --no-build-isolation --editable ".[plot]"
	touch $@

$(VENV)/test-tools: $(VENV)/built
	pip install --quiet --no-build-isolation --editable ".[test]"
	touch $@

$(VENV)/lint-tools: $(VENV)/built
	pip install --quiet --no-build-isolation --editable ".[lint]"
	touch $@
