# A short front for CMake: each target does its own set-up and says what it installs. CMake users
# need none of this, see CMakePresets.json.
PREFIX ?= /usr/local
DESTDIR ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
RINGATTN = build/release/ringattn
DEMO = tests/golden/global_packed.safetensors tests/golden/sliding_vision_packed.safetensors

# $(call build,PRESET,CMAKE ARGUMENTS,BUILD ARGUMENTS): the log is shown only if something fails.
build = mkdir -p build && echo 'building preset $(1), log in build/$(1).log' && \
    { cmake --preset $(1) $(2) && cmake --build --preset $(1) -j $(JOBS) $(3); } \
    >build/$(1).log 2>&1 || { cat build/$(1).log; exit 1; }

.PHONY: help demo check soak bench gpu-check gpu-bench gpu-bench-ring install lint asan tsan fuzz coverage clean

help:
	@echo 'make demo      build, then check two captured Gemma 4 layers on 4 ranks, forward and backward'
	@echo 'make check     build with asserts and run every test; the first time it installs torch and'
	@echo '               transformers outside the tree, several GB: PYTHON_TESTS=--installed does not'
	@echo 'make bench     time forward and backward on the CPU, beside PyTorch where it is installed;'
	@echo '               ARGS=--quick for a short one, ARGS=--help for more'
	@echo 'make soak      10,000 steps under random delays: memory, order and bits stay'
	@echo 'make gpu-check build the CUDA backend and check it on this machine'\''s GPU'
	@echo 'make gpu-bench time it there, beside cuBLAS, and the Python front; gpu-bench-ring: a ring over two GPUs'
	@echo 'make install   install under PREFIX ($(PREFIX)); DESTDIR is honoured'
	@echo 'make asan      the tests under AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make tsan      the tests under ThreadSanitizer'
	@echo 'make fuzz      20 seconds of every fuzz target (clang)'
	@echo 'make lint      format, layers, exports, sizes, static analysis, manual pages'
	@echo 'make coverage  the tests with line counts, a table at the end'
	@echo 'make clean     remove build/'

demo:
	@tools/setup.sh demo
	@$(call build,release,,--target ringattn-cli)
	$(RINGATTN) check $(DEMO) --ranks 4

check:
	@tools/setup.sh check
	@$(call build,dev)
	ctest --preset dev -j $(JOBS)
	@tools/python_tests.sh $(PYTHON_TESTS)

# 5,000 percent of the test's 200 steps.
soak:
	@tools/setup.sh check
	@$(call build,dev,,--target test_soak)
	RA_TEST_STEPS=5000 build/dev/tests/test_soak

bench:
	@tools/setup.sh bench
	@$(call build,release,,--target ringattn-cli)
	python3 bench/cpu_bench.py $(ARGS)

gpu-check:
	tools/gpu_check.sh

gpu-bench:
	tools/gpu_check.sh build
	build/gpu/gpu_bench --json build/gpu/bench.json
	build/gpu/gpu_bench --backward --json build/gpu/bench_backward.json
	RINGATTN_LIBRARY=$(CURDIR)/build/gpu/libringattn-cuda.so PYTHONPATH=python \
		python3 python/bench/overhead.py

gpu-bench-ring:
	tools/gpu_check.sh build
	build/gpu/gpu_bench_ring --trace build/gpu/trace

install:
	@tools/setup.sh demo
	@$(call build,release,-DCMAKE_INSTALL_PREFIX='$(PREFIX)')
	DESTDIR='$(DESTDIR)' cmake --install build/release

lint:
	@tools/setup.sh check
	@$(call build,dev)
	tools/lint.sh build/dev

asan:
	@tools/setup.sh check
	@$(call build,asan-ubsan)
	RA_TEST_STEPS=$${RA_TEST_STEPS:-20} ctest --preset asan-ubsan -j $(JOBS)

tsan:
	@tools/setup.sh check
	@$(call build,tsan)
	RA_TEST_STEPS=$${RA_TEST_STEPS:-10} ctest --preset tsan -j $(JOBS)

fuzz:
	@tools/setup.sh fuzz
	@$(call build,fuzz)
	ctest --preset fuzz -j $(JOBS)

coverage:
	@tools/setup.sh check
	@$(call build,coverage)
	ctest --preset coverage -j $(JOBS)
	tools/coverage.py

clean:
	rm -rf build
