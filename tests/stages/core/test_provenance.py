"""The commit of a spec: read from git's files, whatever git's configuration says."""

import os
import subprocess
from pathlib import Path

import pytest

from ortprep.stages.core.provenance import read_spec_commit

_IDENTITY = {
    "GIT_AUTHOR_NAME": "Ada",
    "GIT_AUTHOR_EMAIL": "ada@example.org",
    "GIT_COMMITTER_NAME": "Ada",
    "GIT_COMMITTER_EMAIL": "ada@example.org",
    "GIT_CONFIG_GLOBAL": os.devnull,
}


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | _IDENTITY,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    (folder / "configs").mkdir(parents=True)
    (folder / "configs/net.yaml").write_text("name: net\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "Add the spec")
    return folder


def program_that_writes(file: Path, folder: Path) -> Path:
    program = folder / "monitor.sh"
    program.write_text(f"#!/bin/sh\necho ran > {file}\n")
    program.chmod(0o755)
    return program


@pytest.mark.attack
def test_no_program_of_a_repositorys_configuration_runs(repository, tmp_path):
    proof = tmp_path / "ran"
    git(repository, "config", "core.fsmonitor", str(program_that_writes(proof, tmp_path)))
    commit = git(repository, "rev-parse", "HEAD")
    assert read_spec_commit(repository / "configs") == commit
    assert not proof.exists()
    git(repository, "status")
    assert proof.exists(), "git itself has to run it, or this proves nothing"


@pytest.mark.attack
def test_a_bare_repository_of_ordinary_files_is_none(repository, tmp_path):
    """Any clone brings such files; git takes the folder for a repository and runs its program."""
    specs, proof = tmp_path / "specs", tmp_path / "ran"
    git(tmp_path, "clone", "-q", "--bare", str(repository), str(specs))
    (specs / "worktree").mkdir()
    settings = {"bare": "false", "worktree": "worktree"}
    for name, value in (settings | {"fsmonitor": str(program_that_writes(proof, tmp_path))}).items():
        git(specs, "config", f"core.{name}", value)
    assert read_spec_commit(specs) is None
    assert not proof.exists()
    git(specs, "status")
    assert proof.exists(), "git itself has to run it, or this proves nothing"


@pytest.mark.attack
@pytest.mark.parametrize(
    "branch", ["../../secret", "/etc/hostname", "refs/heads/link", "refs/heads/pipe", "\0"]
)
def test_a_branch_that_leads_out_of_the_repository_is_none(repository, tmp_path, branch):
    (tmp_path / "secret").write_text("0" * 40)
    (repository / ".git/refs/heads/link").symlink_to(tmp_path / "secret")
    os.mkfifo(repository / ".git/refs/heads/pipe")
    (repository / ".git/HEAD").write_text(f"ref: {branch}\n")
    assert read_spec_commit(repository) is None


@pytest.mark.attack
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to another user")
@pytest.mark.parametrize("of", ["repository", "worktree", "link"])
def test_a_repository_of_another_user_is_none(repository, tmp_path, of):
    """In a folder where all may write, anyone can put a `.git` above others' folders."""
    folder = {"worktree": tmp_path / "worktree", "link": tmp_path / "link"}.get(of, repository)
    taken = folder / ".git"
    if of == "worktree":
        git(repository, "worktree", "add", "-q", str(folder))
        taken = repository / ".git/worktrees/worktree"
    elif of == "link":
        folder.mkdir()
        taken.symlink_to(repository / ".git")
    assert read_spec_commit(folder) == git(repository, "rev-parse", "HEAD")
    os.chown(taken, 65534, 65534, follow_symlinks=False)
    assert read_spec_commit(folder) is None


@pytest.mark.attack
@pytest.mark.parametrize("missing", ["objects", "refs"])
def test_a_folder_that_only_has_a_head_is_no_repository(repository, missing):
    (repository / ".git/HEAD").write_text("0" * 40)
    (repository / ".git" / missing).rename(repository / "elsewhere")
    assert read_spec_commit(repository) is None


def test_the_commit_is_the_one_git_names_however_it_is_stored(repository, tmp_path):
    commit = git(repository, "rev-parse", "HEAD")
    assert read_spec_commit(repository / "configs") == commit
    git(repository, "tag", "-am", "first", "v1")
    git(repository, "pack-refs", "--all")
    assert read_spec_commit(repository / "configs") == commit
    git(repository, "worktree", "add", "-q", "-b", "team/topic", str(tmp_path / "worktree"))
    git(tmp_path / "worktree", "commit", "-q", "--allow-empty", "-m", "Another")
    other = git(tmp_path / "worktree", "rev-parse", "HEAD")
    assert other != commit
    assert read_spec_commit(tmp_path / "worktree/configs") == other
    git(repository, "checkout", "-q", "--detach")
    assert read_spec_commit(repository) == commit


def test_a_folder_in_no_repository_has_no_commit(tmp_path):
    assert read_spec_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert read_spec_commit(tmp_path) is None, "a repository without a commit"
