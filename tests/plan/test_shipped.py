"""The recipes and cluster files that raypod contains are found from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypod.__main__ import main
from raypod.plan import shipped

HOME = Path(__file__).resolve().parents[2]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["gpt-tiny.yaml", "gpt-tiny", "configs/gpt-tiny.yaml"])
def test_a_recipe_is_found_by_its_name(name: str, empty: Path) -> None:
    assert shipped.find(name, shipped.RECIPES) == HOME / "configs" / "gpt-tiny.yaml"


@pytest.mark.parametrize("name", ["gpt-tiny.yaml", "configs/gpt-tiny.yaml"])
def test_a_file_of_the_user_comes_first(name: str, empty: Path) -> None:
    (empty / "configs").mkdir()
    (empty / name).write_text("{}")
    assert shipped.find(name, shipped.RECIPES) == Path(name)


@pytest.mark.parametrize("name", ["other.yaml", "elsewhere/gpt-tiny.yaml", "/gpt-tiny.yaml", "pod4.yaml"])
def test_another_path_stays_as_it_is(name: str, empty: Path) -> None:
    assert shipped.find(name, shipped.RECIPES) == Path(name)


def test_the_copy_of_an_installed_package_is_used(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = empty / "raypod" / "shipped" / "configs"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").touch()
    monkeypatch.setattr(shipped, "_PACKAGE", empty / "raypod")
    assert shipped.names(shipped.RECIPES) == ["mine.yaml"]
    assert shipped.find("mine", shipped.RECIPES) == folder / "mine.yaml"


def test_a_plan_from_an_empty_folder(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "digits", "--cluster", "pod4.yaml", "--dry-run"]) == 0
    assert "pod4: 1 host (10.0.0.11)" in capsys.readouterr().out
    assert not [*empty.iterdir()]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --config gtp-tiny.yaml", "did you mean gpt-tiny.yaml, which raypod contains?"),
        ("train --config zzz", "raypod contains cifar10-resnet101-2ipu.yaml, "),
        ("plan --cluster pdo64.yaml", "did you mean pod64.yaml, which raypod contains?"),
        ("up pod64.yaml", "`raypod files pod64.yaml > pod64.yaml` writes the one that raypod contains: edit"),
        ("down cluster/pod64.yaml", "`raypod files pod64.yaml > pod64.yaml` writes the one that raypod contains: edit"),
        ("files pod46", "did you mean pod4.yaml?"),
    ],
)
def test_a_missing_file_is_one_line(line: str, message: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err


@pytest.mark.parametrize("name", ["pod64", "pod64.yaml", "cluster/pod64.yaml"])
def test_a_plan_says_that_its_cluster_file_is_that_of_raypod(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--cluster", name]) == 0
    assert f"cluster file  pod64.yaml of raypod; there is no file {name} here\n" in capsys.readouterr().out
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text((HOME / "cluster" / "pod64.yaml").read_text())
    assert main(["plan", "--cluster", name]) == 0
    assert "of raypod" not in capsys.readouterr().out


def test_files_are_listed_and_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["files"]) == 0
    out = capsys.readouterr().out
    assert "a ResNet-101 on two IPUs, eight replicas in four instances\n" in out  # a pipe: one line for each file
    monkeypatch.setattr("raypod.commands.files.width_of", lambda stream: 80)
    assert main(["files"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "..." not in out
    assert f"\n{'':32}a ResNet-101 on two IPUs, eight replicas in four\n{'':32}instances\n" in out
    for kind in (shipped.RECIPES, shipped.CLUSTERS):
        assert all(name in out for name in shipped.names(kind))
    assert main(["files", "pod64"]) == 0
    assert capsys.readouterr().out == (HOME / "cluster" / "pod64.yaml").read_text()
