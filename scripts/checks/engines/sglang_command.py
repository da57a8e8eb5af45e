"""SGLang's own command on a CPU: as `sglang`, after what `sglang_stubs` replaces, in its workers too.

python -m scripts.checks.engines.sglang_command generate --model-path FOLDER …
"""

from __future__ import annotations

from scripts.checks.engines.sglang_stubs import put_in_place

put_in_place()  # workers import this module again, as spawned processes do

if __name__ == "__main__":
    from sglang.cli.main import main

    main()
