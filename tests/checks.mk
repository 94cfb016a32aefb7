# Checks that go further than make test, each with its own compiler, machine or card; Makefile includes this file.
#
# make asan     the tests under AddressSanitizer and UndefinedBehaviorSanitizer
# make fuzz     libFuzzer on what comes from outside, FUZZ_SECONDS each
# make test-simd     numbers and products by other kinds of SIMD than this machine's; make check-macos, a part of it: do the
#               sources compile for macOS?
# make test-gpu      the tests of the kernels on a real card; make sanitize-gpu: under compute-sanitizer
# make bench-gpu     the table of docs/gpu.md, on this card

FUZZ_SECONDS ?= 60
ASAN_TESTS := $(filter-out test_cuda% test_twins test_plain,$(TESTS))
GPU_TESTS := test_twins test_cuda_model
SIMD_TESTS := $(addprefix build/simd/test_numbers.,sse2 avx2 neon) $(addprefix build/simd/test_products.,sse2 avx2)
MACOS_CHECKS := $(addprefix build/macos/,llm.cu plain/llm.cu fast/attend.cpp fast/linear.cpp tokenizer.c \
  base/json.cpp base/tokenizer_json.cpp)
FUZZERS := $(patsubst tests/%.cpp,%,$(wildcard tests/fuzz_*.cpp))
SANITIZE := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer \
  $(if $(findstring clang,$(CXX)),,-Wno-maybe-uninitialized)

.PHONY: asan fuzz test-simd check-macos test-gpu sanitize-gpu bench-gpu need-fuzz need-simd need-nvcc

asan: need-tests
	$(AGAIN) found build/asan/llm $(ASAN_TESTS:%=build/asan/%)
	@LLM=build/asan/llm sh tests/run.sh $(ASAN_TESTS:%=build/asan/%)

fuzz: need-fuzz
	$(AGAIN) $(FUZZERS:%=run_%)

run_%: build/%
	@mkdir -p build/corpus/$* && build/$* -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=4096 -verbosity=0 \
	  -print_funcs=0 -artifact_prefix=build/ build/corpus/$* && echo "$*: $(FUZZ_SECONDS) s, nothing found"

test-simd: need-simd need-venv
	$(AGAIN) $(SIMD_TESTS) check-macos
	@sh tests/run.sh $(SIMD_TESTS)

check-macos: need-venv
	$(AGAIN) $(MACOS_CHECKS)
	@echo "✓ macOS on arm64: all sources compile; none was run"

test-gpu: need-tests need-nvcc
	$(AGAIN) found $(GPU_TESTS:%=build/gpu/%)
	@JOBS=1 sh tests/run.sh $(GPU_TESTS:%=build/gpu/%)

sanitize-gpu: need-tests need-nvcc
	$(AGAIN) found $(GPU_TESTS:%=build/gpu/%)
	@PATH="$$PATH:$(dir $(NVCC))" sh tests/sanitize_gpu.sh $(GPU_TESTS:%=build/gpu/%)

bench-gpu: need need-nvcc
	$(AGAIN) found build/gpu/bench_gpu
	@build/gpu/bench_gpu

# ---- What must be there --------------------------------------------------------------------------------------

need-fuzz: need
	$(call need_packages,clang++:clang /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a:libclang-rt-14-dev)

need-simd: need-tests
	$(call need_packages,aarch64-linux-gnu-g++:g++-aarch64-linux-gnu qemu-aarch64:qemu-user)

need-nvcc:
	@[ -n "$(NVCC)" ] || { echo "nvcc: $(NO_NVCC): install the CUDA toolkit 13"; exit 1; }

# ---- Building ------------------------------------------------------------------------------------------------

build/asan/llm: llm.cu $(OBJECTS:build/%=build/asan/%)
	$(CXX) $(CXXFLAGS) $(SANITIZE) $(DEPENDS) -x c++ llm.cu -x none $(OBJECTS:build/%=build/asan/%) $(LIBS) -o $@
	ln -sfn ../../weights_tools build/asan/weights_tools  # llm looks for its built-in checkpoint beside itself

build/asan/test_%: tests/test_%.cpp $(OBJECTS:build/%=build/asan/%)
	$(CXX) $(CXXFLAGS) $(SANITIZE) $(DEPENDS) $< $(OBJECTS:build/%=build/asan/%) $(LIBS) -o $@

# The fuzzed parsers, with clang's sanitizers, libFuzzer and its count of branches reached.
FUZZ := -O1 -g -fno-sanitize-recover=all
build/fuzz_%: tests/fuzz_%.cpp tokenizer.c $(wildcard base/*) build/flags
	clang -std=c11 $(FUZZ) -fsanitize=fuzzer-no-link,address,undefined -c tokenizer.c -o $@.o
	clang++ -std=c++17 $(FUZZ) -fsanitize=fuzzer,address,undefined $< base/*.cpp $@.o $(LIBS) -o $@

# Numbers with another kind of SIMD than this machine's, and how that is run.
SIMD.sse2 := $(CXX) -march=x86-64
SIMD.avx2 := $(CXX) -march=x86-64-v3
SIMD.neon := aarch64-linux-gnu-g++ -idirafter $(INCLUDE)
RUN.neon := qemu-aarch64 -L /usr/aarch64-linux-gnu
build/simd/%: tests/test_numbers.cpp fast/simd.h $(STORY) $(wildcard tests/*.h) build/flags
	$(SIMD$(suffix $*)) -std=c++17 -O1 -ffp-contract=off -Wno-unknown-pragmas $(WARN) $< -o $@.program
	printf '#!/bin/sh\nexec $(RUN$(suffix $*)) $@.program "$$@"\n' > $@ && chmod +x $@

# Products with fewer lanes than this machine has. With 4 lanes g++ needs minutes to optimize them.
OPTIMIZE.sse2 := -O0
build/simd/test_products.%: tests/test_products.cpp fast/linear.cpp $(wildcard fast/*.h) $(STORY) build/flags
	$(SIMD.$*) -std=c++17 $(or $(OPTIMIZE.$*),-O1) -ffp-contract=off $(OPENMP) $(WARN) $< fast/linear.cpp $(LIBS) -o $@

# The sources as macOS's compiler reads them: zig has its clang and its headers, to which come those of the libraries
# alone. zig prepares the source, since its headers take options that only it knows.
ZIG := ZIG_GLOBAL_CACHE_DIR=build/zig/cache build/zig/bin/python -m ziglang
MACOS := -ffp-contract=off -Wno-unknown-pragmas $(WARN)
build/zig/headers:
	python3 -m venv build/zig
	build/zig/bin/pip install -q ziglang==0.17.1
	mkdir $@
	ln -s $(INCLUDE)/nlohmann $(INCLUDE)/oniguruma.h $(INCLUDE)/utf8proc.h $(INCLUDE)/editline $(INCLUDE)/hwy $@

build/macos/%: $(SOURCES) tokenizer.c $(wildcard base/* fast/*) build/flags | build/zig/headers
	mkdir -p $(@D)
	$(ZIG) $(if $(filter %.c,$*),cc -std=c11,c++ -std=c++17) -target aarch64-macos -isystem build/zig/headers -E \
	  $(if $(filter plain/%,$*),-DPLAIN) $(if $(filter %.cu,$*),-x c++) $(*:plain/%=%) > $@.i
	$(ZIG) clang -target arm64-apple-macos13 -fsyntax-only $(MACOS) \
	  $(if $(filter %.c,$*),-std=c11 -x cpp-output,-std=c++17 -x c++-cpp-output) $@.i
	mv $@.i $@

# The same tests for a real card.
build/gpu/%.o: tests/%.cpp build/flags
	$(NVCC) -ccbin $(CXX) $(NVCCFLAGS) $(DEPENDS) -x cu -c $< -o $@

build/gpu/%: build/gpu/%.o $(OBJECTS)
	$(NVCC) -ccbin $(CXX) $< $(OBJECTS) -Xcompiler "$(OPENMP)" $(LIBS) $(CUDA_LIBS) -o $@
