"""What a script would publish while it is looked at or tried stays here."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from ladder.trial.script.publishing import publish_nothing
publish_nothing()
from huggingface_hub import HfApi, create_repo, upload_file
print(HfApi().create_repo("somebody/model", exist_ok=True).repo_id, create_repo("somebody/other").repo_id)
print(HfApi().upload_folder(repo_id="somebody/model", folder_path="."), upload_file(path_or_fileobj=b""))
"""


def test_a_script_that_makes_a_repository_and_uploads_goes_on_and_nothing_leaves_the_machine() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-2:] == ["somebody/model somebody/other", "None None"]
