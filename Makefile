# make          names and installs what is missing, says what it found, builds ./llm
# make run      generates from the built-in checkpoint with the KV cache, then beside the naive path
# make test     builds and runs all tests; the last line is "N passed, N failed"
# make asan     the same tests under AddressSanitizer and UndefinedBehaviorSanitizer
# make fuzz     libFuzzer on what comes from outside, FUZZ_SECONDS each
# make test-simd     numbers and layers by every kind of SIMD, also those that this machine (an x86-64 with AVX2) has not
# make test-gpu      the tests of the kernels on a real card; make sanitize-gpu: under compute-sanitizer
# make bench-gpu     the table of docs/gpu.md, on this card
# CUDA=0 leaves nvcc out; CXX=clang++ takes clang; CUDA_HOME says where the toolkit is; CUDA_ARCH="90 120" for which GPUs.

CXX := $(if $(filter default,$(origin CXX)),g++,$(CXX))
CC := $(if $(filter default,$(origin CC)),gcc,$(CC))
CUDA_HOME ?= /usr/local/cuda
CUDA ?= 1
CUDA_ARCH ?= 80 90 120
FUZZ_SECONDS ?= 60
PROMPT ?= Once upon a time

# CUDA_HOME if it is given, then PATH, then the usual places.
IN_PATH := $(shell command -v nvcc)
ALL_NVCC := $(if $(filter 0,$(CUDA)),,$(if $(filter file,$(origin CUDA_HOME)),$(IN_PATH)) \
  $(wildcard $(CUDA_HOME)/bin/nvcc) $(IN_PATH) $(wildcard /usr/local/cuda-*/bin/nvcc /opt/cuda/bin/nvcc))
# An older one, such as Debian 12's, does not know all GPUs: the first that does is taken.
misses = $(filter-out $(shell $(1) --list-gpu-arch 2>/dev/null),$(CUDA_ARCH:%=compute_%))
NVCC := $(firstword $(foreach nvcc,$(ALL_NVCC),$(if $(call misses,$(nvcc)),,$(nvcc))))
OLD_NVCC := $(if $(NVCC),,$(firstword $(ALL_NVCC)))
NO_NVCC := $(if $(filter 0,$(CUDA)),left out by CUDA=0,$(if $(OLD_NVCC),$(OLD_NVCC) does not know $(call misses,$(OLD_NVCC)) \
  (CUDA_HOME names another toolkit, CUDA_ARCH other GPUs),not found (CUDA_HOME says where the toolkit is)))
# clang++ compiles the kernels' tests in half the time, and they run in half: it is taken where it is and none is given.
KERNEL_CXX := $(or $(if $(filter file,$(origin CXX)),$(shell echo 'int main() {}' | \
  clang++ -fopenmp -fsanitize=address -x c++ - -o /dev/null 2>/dev/null && echo clang++)),$(CXX))
# An empty program shows whether a flag works with this compiler.
works = $(shell echo 'int main() {}' | $(CXX) $(1) -x c++ - -o /dev/null 2>/dev/null && echo $(1))
OPENMP := $(call works,-fopenmp)
NATIVE := $(call works,-march=native)
has = $(shell echo | $(CXX) $(NATIVE) -dM -E -x c++ - 2>/dev/null | grep -q '__$(1)__' && echo ' $(1)')
SIMD := $(or $(call has,AVX512BW),$(call has,AVX2),$(if $(call has,aarch64), NEON), no SIMD this code knows)

# Sums are reassociated by hand and multiply-adds written out (numbers.h): the compiler shall not do it on its own.
WARN := -Wall -Wextra -Werror
HOST := -O3 $(NATIVE) -ffp-contract=off $(or $(OPENMP),-Wno-unknown-pragmas)
CXXFLAGS := -std=c++17 $(HOST) $(WARN)
CFLAGS := -std=c11 -O2 $(WARN)
# With the sanitizers' checks in between, g++ sees paths on which a std::variant would not be initialised.
SANITIZE := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer \
  $(if $(findstring clang,$(CXX)),,-Wno-maybe-uninitialized)
LIBS := -lcjson -lpcre2-8 -lutf8proc
comma := ,
empty :=
# Machine code for each GPU asked for, and PTX, which drivers compile for those between and to come.
NVCCFLAGS := -std=c++17 -O3 -Werror all-warnings --threads 0 \
  $(foreach arch,$(CUDA_ARCH),-gencode 'arch=compute_$(arch),code=[compute_$(arch),sm_$(arch)]') \
  -Xcompiler $(subst $(empty) ,$(comma),$(HOST) -Wall -Wextra -Werror)
CUDA_LIBS := -Xlinker -rpath,$(NVCC:/bin/nvcc=/lib64)
SOURCES := llm.cu device.h model.h tokenizer.h cache.h numbers.h layers.cu attention.cu tensor_cores.cu measure.h
TESTS := $(patsubst tests/%.cpp,%,$(wildcard tests/test_*.cpp))
ASAN_TESTS := $(filter-out test_cuda%,$(TESTS))
GPU_TESTS := $(filter-out test_cuda_on_cpu,$(filter test_cuda%,$(TESTS)))
SIMD_TESTS := $(addprefix build/simd/test_,numbers.plain numbers.avx512 numbers.neon \
  layers.plain layers.avx512 layers.vnni layers.neon layers.dotprod)
FUZZERS := $(patsubst tests/%.cpp,%,$(wildcard tests/fuzz_*.cpp))

# What -march=native stands for here: its predefined macros.
MACHINE := $(shell echo | $(CXX) $(NATIVE) -dM -E -x c++ - 2>/dev/null | cksum)
FLAGS := $(NVCC) $(CC) $(CXX) $(KERNEL_CXX) $(CXXFLAGS) $(CFLAGS) $(MACHINE)
# Changes when the compilers, the flags or the machine do, so that nothing is linked from two worlds.
$(shell mkdir -p build/asan build/gpu build/simd; echo '$(FLAGS)' | cmp -s - build/flags || echo '$(FLAGS)' > build/flags)

.PHONY: all run test asan fuzz test-simd test-gpu sanitize-gpu bench-gpu need need-tests need-fuzz need-simd need-nvcc \
  found clean
.DELETE_ON_ERROR:
.SECONDARY:

# What is missing is installed first; then make starts anew, and finds compilers and flags as they are now.
AGAIN := +@$(MAKE) --no-print-directory

all: need
	$(AGAIN) found llm

run: all
	@echo; echo "With the KV cache:  ./llm generate -n 200 -p \"$(PROMPT)\""; echo
	@./llm generate -n 200 -p "$(PROMPT)"
	@echo; echo "Without and with, side by side:  ./llm diff -n 200 -p \"$(PROMPT)\""; echo
	@./llm diff -n 200 -p "$(PROMPT)"

test: need-tests
	$(AGAIN) found llm $(TESTS:%=build/%)
	@sh tests/run.sh $(TESTS:%=build/%)

asan: need-tests
	$(AGAIN) found build/asan/llm $(ASAN_TESTS:%=build/asan/%)
	@LLM=build/asan/llm sh tests/run.sh $(ASAN_TESTS:%=build/asan/%)

fuzz: need-fuzz
	$(AGAIN) $(FUZZERS:%=run_%)

run_%: build/%
	@mkdir -p build/corpus/$* && build/$* -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=4096 -verbosity=0 \
	  -print_funcs=0 -artifact_prefix=build/ build/corpus/$* && echo "$*: $(FUZZ_SECONDS) s, nothing found"

test-simd: need-simd
	$(AGAIN) $(SIMD_TESTS)
	@sh tests/run.sh $(SIMD_TESTS)

test-gpu: need-tests need-nvcc
	$(AGAIN) found $(GPU_TESTS:%=build/gpu/%)
	@JOBS=1 sh tests/run.sh $(GPU_TESTS:%=build/gpu/%)

sanitize-gpu: need-tests need-nvcc
	$(AGAIN) found $(GPU_TESTS:%=build/gpu/%)
	@PATH="$$PATH:$(dir $(NVCC))" sh tests/sanitize_gpu.sh $(GPU_TESTS:%=build/gpu/%)

bench-gpu: need need-nvcc
	$(AGAIN) found build/gpu/bench_gpu
	@build/gpu/bench_gpu

clean:
	rm -rf build llm

# ---- What must be there --------------------------------------------------------------------------------------

# need_packages(list of file-or-command:package): names and installs the Debian packages of what is not found.
define need_packages
@missing=""; for pair in $(1); do thing=$${pair%%:*}; \
  command -v $$thing >/dev/null 2>&1 || ls $$thing >/dev/null 2>&1 || missing="$$missing $${pair##*:}"; done; \
if [ -n "$$missing" ]; then \
  install="apt-get update && apt-get install -y --no-install-recommends$$missing"; \
  echo "missing Debian packages:$$missing"; \
  if [ "$$(id -u)" = 0 ]; then sh -c "$$install"; \
  elif command -v sudo >/dev/null; then sudo sh -c "$$install"; \
  else echo "neither root nor sudo: let somebody who may run  $$install"; exit 1; fi; fi
endef

INCLUDE := /usr/include
need:
	$(call need_packages,$(foreach compiler,$(CXX) $(CC),$(compiler):$(patsubst clang++%,clang%,$(notdir $(compiler)))) $(INCLUDE)/cjson/cJSON.h:libcjson-dev \
	  $(INCLUDE)/pcre2.h:libpcre2-dev $(INCLUDE)/utf8proc.h:libutf8proc-dev \
	  $(if $(findstring clang,$(CXX)),/usr/lib/llvm-*/lib/libomp.so:libomp-dev))

need-tests: need
	$(call need_packages,$(INCLUDE)/doctest/doctest.h:doctest-dev $(INCLUDE)/boost/context/fiber.hpp:libboost-context-dev)

need-fuzz: need
	$(call need_packages,clang++:clang /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a:libclang-rt-14-dev)

need-simd: need-tests
	$(call need_packages,$(INCLUDE)/simde/x86/avx512.h:libsimde-dev aarch64-linux-gnu-g++:g++-aarch64-linux-gnu \
	  qemu-aarch64:qemu-user)

need-nvcc:
	@[ -n "$(NVCC)" ] || { echo "nvcc: $(NO_NVCC): install the CUDA toolkit 13"; exit 1; }

found:
	@echo "✓ $$($(CXX) --version | head -n 1),$(if $(NATIVE), -march=native:)$(SIMD)"
	@echo "$(if $(OPENMP),✓ OpenMP: $$(nproc) cores,✗ OpenMP: $(CXX) has none$(comma) one thread)"
	@echo "$(if $(NVCC),✓ $(NVCC),✗ nvcc: $(NO_NVCC)$(comma) building for the CPU only)"

# ---- Building ------------------------------------------------------------------------------------------------

llm: $(SOURCES) build/tokenizer.o build/flags
ifneq ($(NVCC),)
	$(NVCC) -ccbin $(CXX) $(NVCCFLAGS) llm.cu build/tokenizer.o $(LIBS) $(CUDA_LIBS) -o $@
else
	$(CXX) $(CXXFLAGS) -x c++ llm.cu -x none build/tokenizer.o $(LIBS) -o $@
endif

build/tokenizer.o: tokenizer.c tokenizer.h build/flags
	$(CC) $(CFLAGS) -c $< -o $@

build/test_%: tests/test_%.cpp $(SOURCES) $(wildcard tests/*.h) build/tokenizer.o build/flags
	$(TEST_CXX) $(CXXFLAGS) $< build/tokenizer.o $(LIBS) -o $@

# What these test is llm and tokenizer.o, or little of an engine's work: they compile in half the time so.
build/test_cli build/test_tokenizer build/test_eval build/test_huge_keys build/test_sinks: CXXFLAGS += -O1

build/test_%: TEST_CXX := $(CXX)

# Tests that run the kernels on the CPU (tests/cuda_on_cpu.h) are always checked for accesses out of bounds, and for those
# not aligned, which a GPU refuses.
build/test_cuda%: CXXFLAGS += -O1 -g1 -fsanitize=address,alignment -fno-sanitize-recover=all -fno-omit-frame-pointer \
  $(if $(findstring clang,$(KERNEL_CXX)),,-Wno-maybe-uninitialized)
build/test_cuda%: LIBS += -lboost_context
build/test_cuda%: TEST_CXX := $(KERNEL_CXX)

# Tests with another kind of SIMD than this machine's, and how they are run: AVX-512 is computed by SIMDe, in AVX2.
SIMD.plain := $(CXX) -march=x86-64
SIMD.avx512 := $(CXX) -march=x86-64-v3 -Wno-psabi -include tests/avx512_on_cpu.h
SIMD.vnni := $(SIMD.avx512) -DVNNI
SIMD.neon := aarch64-linux-gnu-g++ -idirafter $(INCLUDE)
SIMD.dotprod := $(SIMD.neon) -march=armv8.2-a+dotprod
RUN.neon := qemu-aarch64 -L /usr/aarch64-linux-gnu
RUN.dotprod := $(RUN.neon)
build/simd/%: $(SOURCES) $(wildcard tests/*.h) tests/test_numbers.cpp tests/test_layers.cpp build/flags
	$(SIMD$(suffix $*)) -std=c++17 -O1 -ffp-contract=off $(OPENMP) $(WARN) tests/$(basename $*).cpp -o $@.program
	printf '#!/bin/sh\nexec $(RUN$(suffix $*)) $@.program "$$@"\n' > $@ && chmod +x $@

# The same tests for a real card.
build/gpu/%.o: tests/%.cpp $(SOURCES) $(wildcard tests/*.h) build/flags
	$(NVCC) -ccbin $(CXX) $(NVCCFLAGS) -x cu -c $< -o $@

build/gpu/%: build/gpu/%.o build/tokenizer.o
	$(NVCC) -ccbin $(CXX) $< build/tokenizer.o -Xcompiler "$(OPENMP)" $(LIBS) $(CUDA_LIBS) -o $@

build/asan/llm: $(SOURCES) build/asan/tokenizer.o
	$(CXX) $(CXXFLAGS) $(SANITIZE) -x c++ llm.cu -x none build/asan/tokenizer.o $(LIBS) -o $@
	ln -sfn ../../weights_tools build/asan/weights_tools  # llm looks for its built-in checkpoint beside itself

build/asan/tokenizer.o: tokenizer.c tokenizer.h build/flags
	$(CC) $(CFLAGS) $(SANITIZE) -c $< -o $@

build/asan/test_%: tests/test_%.cpp $(SOURCES) $(wildcard tests/*.h) build/asan/tokenizer.o
	$(CXX) $(CXXFLAGS) $(SANITIZE) $< build/asan/tokenizer.o $(LIBS) -o $@

# The fuzzed parsers, with clang's sanitizers, libFuzzer and its count of branches reached.
build/fuzz_%: tests/fuzz_%.cpp tokenizer.c tokenizer.h model.h build/flags
	clang -std=c11 -O1 -g -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -c tokenizer.c -o $@.o
	clang++ -std=c++17 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $< $@.o $(LIBS) -o $@
