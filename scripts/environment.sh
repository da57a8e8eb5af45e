# Sourced by the other scripts: makes .venv in the repository and installs what is needed, once per change of the
# requirements. Sets REPO, puts .venv first on the PATH, and the repository
# on the PYTHONPATH: `python -m scripts.…` then works from any folder.
REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPO/.venv"
STAMP="$VENV/.installed"

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "db-SP needs Python 3.10 or newer; install one, or name it: PYTHON=/path/to/python $0" >&2
    return 1
}

requirements_digest() {
    cat "$REPO/pyproject.toml" "$REPO/constraints.txt" "$REPO/scripts/environment.sh" | cksum
}

prepare() {
    if [ "$(cat "$STAMP" 2>/dev/null)" = "$(requirements_digest)" ]; then
        return
    fi
    local python
    python="$(find_python)"
    echo "Setting up $VENV (once; 2 to 15 minutes, most of it downloads of 2 to 7 GB)" >&2
    "$python" -m venv "$VENV" 2>/dev/null || {
        # Some distributions ship Python without ensurepip.
        "$python" -m pip install --quiet --user virtualenv && "$python" -m virtualenv --quiet "$VENV"
    }
    local pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$REPO/constraints.txt")
    # torch first, on its own and pinned: see constraints.txt.
    echo "  1 of 2: torch" >&2
    "${pip[@]}" "$(grep '^torch==' "$REPO/constraints.txt")"
    echo "  2 of 2: diffusers, xfuser, para-attn, the tools of the tests, and db-SP" >&2
    "${pip[@]}" --editable "$REPO[xdit,para,gpu,dev]"
    requirements_digest >"$STAMP"
}

prepare
export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV" PYTHONPATH="$REPO:$REPO/kernels${PYTHONPATH:+:$PYTHONPATH}"
