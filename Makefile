# The verbs a person types. `make help` lists them; CMake does the building (see CMakePresets.json).

PRESET ?= release
PREFIX ?= /usr/local
ARGS ?=

BUILD := build/$(PRESET)
# clang takes a third of the time that g++ takes over units with torch, thanks to its precompiled
# headers. Another compiler: CXX=g++, after make clean.
ifeq ($(origin CXX),default)
CXX := clang++-19
else
export CXX
endif
# A unit that includes torch takes up to 1.5 GB to compile, so memory bounds the jobs as cores do.
JOBS ?= $(shell { cat /sys/fs/cgroup/memory.max 2> /dev/null || echo max; cat /proc/meminfo; } | \
          awk -v jobs="$$(nproc)" -v unit=1572864 \
          'NR == 1 && $$1 != "max" { fits = int($$1 / 1024 / unit); if (fits < jobs) jobs = fits } \
           $$1 == "MemAvailable:" { fits = int($$2 / unit); if (fits < jobs) jobs = fits } \
           END { print jobs < 1 ? 1 : jobs }')
# A test runs its ranks as threads, so each keeps more than one core busy.
TEST_JOBS ?= 2

NINJA = cmake --build $(BUILD) --parallel $(JOBS)

.PHONY: help train test golden differential mutation bench build format check-format install \
  clean FORCE
.DEFAULT_GOAL := help

help:
	@echo 'make train           build fsdp-train and train a small model with two ranks'
	@echo '                     ARGS="--steps=50" passes options, ARGS=--help lists them'
	@echo 'make test            build everything and run all tests'
	@echo 'make golden          rebuild the golden values with PyTorch FSDP2, show differences'
	@echo 'make differential    random scenarios beside PyTorch FSDP2 (SEED=7 COUNT=50)'
	@echo 'make mutation        break the library on purpose: does a test notice?'
	@echo 'make bench           ours beside PyTorch FSDP2, all cases (half an hour) or one: CASE='
	@echo '                     host-overhead, collectives, transformer-small, transformer-large,'
	@echo '                     memory or threads128 (REPETITIONS=1 to try it)'
	@echo 'make build           build everything'
	@echo 'make format          format the sources'
	@echo 'make check-format    check formatting and the other rules of style'
	@echo 'make install         install the library and fsdp-train under PREFIX ($(PREFIX))'
	@echo 'make clean           remove what was built (not what tools/bootstrap fetched)'
	@echo
	@echo 'PRESET=release|dev|asan chooses the build, JOBS=n how many compilers run at once,'
	@echo 'FSDP_TORCH=<dir> a torch of your own: the folder with its include/ and lib/.'

train: $(BUILD)/build.ninja
	@tools/bootstrap text
	@$(NINJA) --target fsdp-train
	$(BUILD)/train/fsdp-train $(ARGS)

test: build
	@ctest --preset $(PRESET) --parallel $(TEST_JOBS)

# Trains with PyTorch's FSDP2 and compares with the values that golden_test holds us to.
golden: .deps/stamp
	@OMP_NUM_THREADS=1 .deps/venv/bin/python tests/golden/make_golden.py --check

# Fresh random scenarios here and in PyTorch's FSDP2, compared.
SEED ?= 7
COUNT ?= 50
differential: $(BUILD)/build.ninja
	@$(NINJA) --target scenario
	@OMP_NUM_THREADS=1 .deps/venv/bin/python tests/scenario/generate.py $(SEED) $(COUNT) \
	  $(BUILD)/scenarios.json
	@for layout in flat per-parameter; do OMP_NUM_THREADS=1 $(BUILD)/tests/scenario \
	  $(BUILD)/scenarios.json --layout $$layout || exit 1; done

# Breaks the library on purpose, and shows that tests notice.
mutation: build
	@PRESET=$(PRESET) JOBS=$(JOBS) tools/mutation

# Ours and PyTorch's FSDP2 in turns; compare.py has the cases.
CASE ?= all
REPETITIONS ?= 5
bench: $(BUILD)/build.ninja
	@tools/bootstrap bench
	@cmake -DFSDP_BUILD_BENCH=ON -DFSDP_BUILD_TESTS=ON $(BUILD) > /dev/null
	@$(NINJA) --target benches reference_test
	@OMP_NUM_THREADS=1 .deps/venv/bin/python bench/compare.py $(BUILD) --case=$(CASE) \
	  --repetitions=$(REPETITIONS)

build: $(BUILD)/build.ninja
	@$(NINJA)

# Ninja configures again by itself when a CMake file changed. A new stamp means another torch or
# other packages: then what was found before does not count.
$(BUILD)/build.ninja: .deps/stamp
	@cmake --preset $(PRESET) --fresh -DCMAKE_CXX_COMPILER="$(CXX)" -DFSDP_TORCH="$(FSDP_TORCH)"
	@touch $@

.deps/stamp: FORCE
	@tools/bootstrap build

format:
	@tools/bootstrap format
	@tools/check_style --fix

check-format:
	@tools/bootstrap format
	@tools/check_style

install: $(BUILD)/build.ninja
	@$(NINJA) --target installed
	@cmake --install $(BUILD) --prefix "$(PREFIX)"

clean:
	rm -rf build
