"""The command line, run as a process: what it prints where, and how it exits."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from helpers_models import CHARACTERS, write_tiny_model

import minivllm.__main__


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def mini_vllm(
    *arguments: str | Path, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from minivllm.cli import main; main()", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "120", "HF_HUB_OFFLINE": "1"} | environment,
        check=False,
    )


GREEDY = ("--max-tokens", "8", "--temperature", "0", "--num-blocks", "8")


def test_the_text_is_on_stdout_and_the_rest_on_stderr(model: Path) -> None:
    streamed = mini_vllm("generate", model, "once upon a time", *GREEDY)
    assert streamed.returncode == 0, streamed.stderr
    assert "8 blocks" in streamed.stderr and "16 prompt tokens, 8 generated" in streamed.stderr

    whole = mini_vllm("generate", model, "-", *GREEDY, "--json", "--logprobs", "2", stdin="once upon a time")
    assert whole.returncode == 0, whole.stderr
    output = json.loads(whole.stdout)
    (completion,) = output["outputs"]
    assert completion["text"] + "\n" == streamed.stdout
    assert len(completion["token_ids"]) == 8 and completion["finish_reason"] == "length"
    assert all(len(logprobs) in (2, 3) for logprobs in completion["logprobs"])


def test_the_same_seed_gives_the_same_text(model: Path) -> None:
    runs = [mini_vllm("generate", model, "a", "-n", "20", "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert runs[0] == runs[1] != runs[2]


def test_without_a_seed_runs_differ_and_tell_theirs(model: Path) -> None:
    first, second = (mini_vllm("generate", model, "a", "-n", "30") for _ in range(2))
    assert first.stdout != second.stdout
    seed = first.stderr.rsplit("seed ", 1)[1].strip()
    assert mini_vllm("generate", model, "a", "-n", "30", "--seed", seed).stdout == first.stdout


def test_max_tokens_is_what_the_context_holds_unless_given(model: Path) -> None:
    result = mini_vllm("generate", model, "a" * 120, "--ignore-eos")
    assert result.returncode == 0 and "120 prompt tokens, 8 generated" in result.stderr


def test_a_prompt_far_too_long_is_refused_before_it_is_tokenised(model: Path) -> None:
    for options in ((), ("-n", "1"), ("--json",), ("--min-tokens", "2")):
        result = mini_vllm("generate", model, "-", *options, stdin="x" * 20_000_000)
        assert result.returncode == 1 and "20,000,000 bytes is longer than max_model_len" in result.stderr


def test_token_ids_in_and_out(model: Path) -> None:
    text = mini_vllm("generate", model, "abc", *GREEDY)
    ids = mini_vllm("generate", model, "1, 2 3", "--token-ids", *GREEDY)
    assert ids.returncode == 0, ids.stderr
    characters = "".join(CHARACTERS[int(word)] for word in ids.stdout.split())
    assert characters + "\n" == text.stdout


def test_a_terminal_that_lacks_characters(model: Path) -> None:
    for arguments in (("generate", model, "hi", *GREEDY), ("generate", "--help")):
        assert mini_vllm(*arguments, PYTHONIOENCODING="ascii").returncode == 0


def test_closed_output() -> None:
    program = [sys.executable, "-c", "from minivllm.cli import main; main()", "--help"]
    closed = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *program], capture_output=True, text=True, check=False
    )
    assert closed.returncode == 1 and closed.stderr == "mini-vllm: standard output is closed\n"


def test_memory_that_is_too_short_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("minivllm.cli.app", exhausted)
    with pytest.raises(SystemExit) as exit_status:
        minivllm.__main__.main()
    assert exit_status.value.code == 1
    assert capsys.readouterr().err.startswith("mini-vllm: memory is exhausted")


def test_chat_goes_on_after_a_refused_message(model: Path) -> None:
    talk = mini_vllm("chat", model, "-n", "3", stdin=f"{'x' * 200}\nhi\n")
    assert talk.returncode == 0, talk.stderr
    assert "max_model_len is 128" in talk.stderr and "10 prompt tokens" in talk.stderr


def test_chat_keeps_the_conversation(model: Path) -> None:
    options = ("--max-tokens", "3", "--temperature", "0")
    one = mini_vllm("chat", model, "hi", *options)
    assert one.returncode == 0, one.stderr
    assert "10 prompt tokens" in one.stderr  # "user: hi. "
    talk = mini_vllm("chat", model, "--system", "be brief", *options, stdin="hi\nand\n")
    assert talk.returncode == 0, talk.stderr
    assert "28 prompt tokens" in talk.stderr  # "system: be brief. user: hi. "
    # "assistant: ???. user: and. " comes on top; the random answer may end early
    assert any(f"{28 + 13 + n + 11} prompt tokens" in talk.stderr for n in range(4)), talk.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "no/such/model", "hi"), "no/such/model"),
        (("generate", "{model}", ""), "prompt"),
        (("generate", "{model}", "hi", "--temperature", "-1"), "temperature"),
        (("generate", "{model}", "hi", "--temperature", "nan"), "temperature"),
        (("generate", "{model}", "hi", "--top-p", "2"), "top_p"),
        (("generate", "{model}", "hi", "--max-tokens", "0"), "max_tokens"),
        (("generate", "{model}", "hi", "--max-tokens", str(10**18)), "max_tokens"),
        (("generate", "{model}", "hi", "--max-tokens", "128"), "128"),
        (("generate", "{model}", "x" * 129, "--max-tokens", "1"), "129"),
        (("generate", "{model}", "hi", "--stop", ""), "stop"),
        (("generate", "{model}", "hi", "--num-blocks", "0"), "num_blocks"),
        (("generate", "{model}", "hi", "--kv-cache-memory", "nan"), "kv_cache_memory"),
        (("generate", "{model}", "hi", "--kv-cache-memory", "inf"), "kv_cache_memory"),
        (("generate", "{model}", "hi", "--kv-cache-memory", "1e-9"), "kv_cache_memory is 1e-09 MiB; it must"),
        (("generate", "{model}", "hi", "--kv-cache-memory", "0"), "from 0.000001 to 1,073,741,824 MiB"),
        (("generate", "{model}", "hi", "--kv-cache-memory", "1e-6"), "holds 0 blocks"),
        (("generate", "{model}", "hi", "--quantization", "foo"), "'none'"),
        (("generate", "{model}", "hi", "--min-tokens", "9000"), "min_tokens is 9,000"),
        (("generate", "{model}", "hi", "-n", "9000"), "max_tokens is 9,000"),
        (("generate", "{model}", "hi", "--block-size", "1000"), "block_size"),
        (("generate", "{model}", "hi", "--device", "tpu"), "device"),
        (("pull", "gpt-5"), "gpt-5"),
        (("generate", "missing/model.gguf", "hi"), "missing/model.gguf"),
        (("generate", "{model}", "hi", "--logprobs", "1"), "--json"),
        (("generate", "{model}", "x", "--token-ids"), "'x'"),
        (("generate",), "MODEL"),
        (("generate", "{model}", "hi", "--no-such"), "--no-such"),
        (("generate", "{model}", "hi", "-n", "x"), "--max-tokens"),
    ],
)
def test_an_error_is_one_line(model: Path, arguments: tuple[str, ...], words: str) -> None:
    result = mini_vllm(*(str(model) if a == "{model}" else a for a in arguments))
    assert result.returncode in (1, 2) and result.stdout == ""
    (*notes, line) = result.stderr.strip().splitlines()
    assert line.startswith("mini-vllm: ") and words in line, result.stderr
    assert not any("Traceback" in note for note in notes)


def test_a_wrong_command_line_exits_with_2(model: Path) -> None:
    assert mini_vllm("generate", model, "hi", "--no-such").returncode == 2
    assert mini_vllm("generate", "no/such/model", "hi").returncode == 1


def test_input_that_is_no_text_is_refused(model: Path) -> None:
    program = [sys.executable, "-c", "from minivllm.cli import main; main()"]
    commands = [["generate", str(model), "-", "-n", "1"], ["chat", str(model), "-n", "1"]]
    for command in commands:
        for locale in ("C", "C.UTF-8"):
            result = subprocess.run(
                [*program, *command], input=b"\xff\xfe", capture_output=True, timeout=120, check=False,
                env=os.environ | {"LC_ALL": locale},
            )  # fmt: skip
            line = result.stderr.decode().strip().splitlines()[-1]
            assert result.returncode == 1 and line.startswith("mini-vllm: standard input is not utf-8 text")


@pytest.mark.parametrize("module", ["minivllm.cli", "typer", "numpy", "minivllm.config"])
def test_ctrl_c_while_loading_is_quiet(module: str) -> None:
    code = f"""
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from minivllm.__main__ import main
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_it_runs_as_a_module_and_as_the_installed_command() -> None:
    said = [sys.executable, "-m", "minivllm", "--version"]
    result = subprocess.run(said, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout == f"mini-vllm {minivllm.__version__}\n"
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    (command,) = re.findall(r'^mini-vllm = "(.*)"$', project, re.MULTILINE)
    assert EntryPoint("mini-vllm", command, "console_scripts").load() is minivllm.__main__.main


def test_help_names_every_option() -> None:
    result = mini_vllm("generate", "--help")
    assert result.returncode == 0
    assert all(
        name in result.stdout for name in ("--temperature", "--block-size", "--json", "MODEL", "PROMPT")
    )
