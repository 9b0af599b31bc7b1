#!/usr/bin/env bash
# Make the environments of the peers that the benchmarks run beside jaxrl: .venv-tunix and .venv-torch in the
# repository root. Each peer needs its own, because their pins exclude each other (tunix wants safetensors < 0.8).
# Usage: benchmarks/peers/setup.sh [tunix] [torch]      (default: both; about 20 minutes and 4 GB of disk)
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3.11}
peers=("$@")
[ ${#peers[@]} -gt 0 ] || peers=(torch tunix)

for peer in "${peers[@]}"; do
  [ -x ".venv-$peer/bin/python" ] || "$PYTHON" -m venv ".venv-$peer"
  pip=".venv-$peer/bin/pip"
  case "$peer" in
    torch)  # torch first: a later resolver pass must not exchange it for another build
      "$pip" install --quiet torch==2.13.0
      "$pip" install --quiet trl==1.16.0 transformers accelerate ;;
    tunix)  # tunix names no jax in its metadata
      "$pip" install --quiet google-tunix==0.1.7 jax==0.10.2 ;;
    *) echo "unknown peer '$peer': use tunix or torch" >&2; exit 2 ;;
  esac
  "$pip" list 2>/dev/null | grep -iE '^(torch|trl|transformers|accelerate|google-tunix|jax|jaxlib|flax|optax) ' || true
done
