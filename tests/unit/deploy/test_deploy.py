"""What can be said of deploy/ without building it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[3] / "deploy"
STAGES = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("target", ["producer", "worker"])
def test_an_image_runs_as_a_user_without_rights_and_reports_its_health(target: str) -> None:
    (stage,) = [stage for stage in STAGES if stage.splitlines()[0].endswith(f" AS {target}")]
    users = re.findall(r"^USER (\S+)", stage, re.MULTILINE)
    assert users
    assert users[-1].isdigit()  # a number: Kubernetes' runAsNonRoot can't judge names
    assert int(users[-1]) > 0
    assert f"--uid {users[-1]} " in STAGES[0]
    assert "HEALTHCHECK" in stage
    assert stage.index("pip install") < stage.index("USER")


def test_no_secret_and_no_build_output_goes_into_an_image() -> None:
    ignored = (DEPLOY.parent / ".dockerignore").read_text().split()
    assert {".git", ".env", ".venv", "build"} <= set(ignored)


def test_the_compose_file_keeps_what_is_stored_and_mounts_the_users() -> None:
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    command = services["valkey"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--aclfile") + 1] in services["valkey"]["volumes"][0]
    assert services["worker"]["build"]["target"] == "worker"
    for name in ("worker", "submit"):
        assert services[name]["cap_drop"] == ["ALL"]
        assert (
            f"//{'worker' if name == 'worker' else 'producer'}:" in services[name]["environment"]["HEADRACE_REDIS_URL"]
        )


def test_the_acl_file_has_no_open_default_user() -> None:
    lines = (DEPLOY / "acl" / "users.acl").read_text().splitlines()
    assert lines[0] == "user default reset off"
    for line in lines[1:]:
        assert " nopass" not in line
        assert ("+@all" in line) == line.startswith("user admin ")
