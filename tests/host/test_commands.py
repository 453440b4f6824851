"""The commands, as a person or a script calls them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from calling import call
from forking import Forked

from ficco.cli import engine_choice, run
from ficco.cli.arguments import Request, request_from
from ficco.core import data
from ficco.core.errors import InputError
from ficco.lowering.sending import sends
from ficco.operators import OPERATORS, oracle, registry
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

SMALL = ["--m", "67", "--n", "29", "--k", "31", "--iters", "1"]
EVERY_OPERATOR = Path(__file__).with_name("every_operator.py")
HOST = ["--engine", "host"]  # for processes of their own, wherever they run


@pytest.fixture(autouse=True)
def gpus(monkeypatch: Any) -> Any:
    """Let commands of this process see so many GPUs; none, unless a test says otherwise."""

    def seen(devices: int, trouble: str = "") -> None:
        monkeypatch.setattr(
            engine_choice, "gpus", lambda *asked: engine_choice.Gpus(devices, trouble)
        )

    seen(0, "libcuda.so.1 not found")
    return seen


class TestRun:
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("ranks", ["1", "2", "3", "4", "8"])
    def test_all_schedules_are_right(self, capsys: Any, dtype: str, ranks: str) -> None:
        code, out, err = call(
            capsys, "run", "--schedule", "all", "--m", "515", "--n", "257", "--k", "129",
            "--ranks", ranks, "--dtype", dtype, "--machine", "host", "--iters", "1", "--json",
        )  # fmt: skip
        document = json.loads(out)
        assert code == 0, err
        assert [row["schedule"] for row in document["results"]] == list(Schedule.names())
        assert all(row["ok"] for row in document["results"])

    def test_the_document_has_the_promised_fields(self, capsys: Any) -> None:
        code, out, err = call(capsys, "run", *SMALL, "--ranks", "2", "--json", "--grain", "3")
        document = json.loads(out)
        assert code == 0
        assert set(document) == {
            "op", "m", "n", "k", "ranks", "dtype", "engine", "machine", "paced", "link_gbps",
            "results", "simulated",
        }  # fmt: skip
        assert (document["machine"], document["paced"]) == ("mesh4", True)
        assert document["link_gbps"] == 0.045
        for row in document["results"]:
            assert set(row) == {
                "schedule", "grain", "serial_ms", "overlap_ms", "speedup", "ideal_ms",
                "efficiency", "max_rel_error", "ok", "copies", "bytes",
            }  # fmt: skip
            assert row["grain"] == (1 if row["schedule"] in ("serial", "shard_p2p") else 3)
            assert row["copies"] == 2 * row["grain"]
            assert row["bytes"] == 67 * 31 * 4  # every shard goes to one peer
            assert row["overlap_ms"] > 0 and row["ideal_ms"] > 0
        assert "EMULATED" in err and "0.045 GB/s" in err

    def test_all_can_be_one_of_several(self, capsys: Any, tmp_path: Path) -> None:
        mine = tmp_path / "mine.toml"
        mine.write_text('taper = "tail"\n')
        for text in (f"all,{mine}", f"{mine},all", f"serial,all,{mine},serial"):
            code, out, err = call(capsys, "run", *SMALL, "--schedule", text, "--iters=1", "--json")
            assert code == 0, err
            rows = [row["schedule"] for row in json.loads(out)["results"]]
            assert sorted(rows) == sorted([*Schedule.names(), "mine"])

    def test_a_file_with_the_name_of_another_schedule(self, capsys: Any, tmp_path: Path) -> None:
        named, unnamed = tmp_path / "a.toml", tmp_path / "serial.toml"
        named.write_text('name = "serial"\ntaper = "tail"\n')
        unnamed.write_text('taper = "tail"\n')
        for file in (named, unnamed):
            code, out, err = call(capsys, "run", *SMALL, "--schedule", f"serial,{file}")
            assert code == 2 and out == "" and f"--schedule {file}: its name is 'serial'" in err
        named.write_text(data.text("named", "serial", "schedule", InputError))
        code, out, err = call(capsys, "run", *SMALL, "--schedule", f"serial,{named}", "--json")
        assert code == 0 and len(json.loads(out)["results"]) == 1, err

    def test_a_file_whose_description_is_no_text(self, capsys: Any, tmp_path: Path) -> None:
        file = tmp_path / "mine.toml"
        file.write_text("about = 3\n")
        code, out, err = call(capsys, "run", *SMALL, "--schedule", str(file))
        assert code == 2 and out == "" and f"schedule '{file}': about=3: a text is needed" in err

    def test_the_table_shows_serial_too(self, capsys: Any) -> None:
        """Speed-ups are relative to it; the document has its time in every row."""
        args = ("run", *SMALL, "--iters", "1", "--schedule", "gated_1d")
        for more in ((), ("--machine", "mesh4", "--simulate")):
            out = call(capsys, *args, *more)[1]
            lines = out.splitlines()
            head = next(i for i, line in enumerate(lines) if line.startswith("schedule "))
            assert [line.split()[0] for line in lines[head + 1 : head + 3]] == [
                "serial",
                "gated_1d",
            ]
            assert "\ngated_1d, " in out  # the picture is of what was requested
            (row,) = json.loads(call(capsys, *args, *more, "--json")[1])["results"]
            assert row["schedule"] == "gated_1d"

    def test_one_rank_has_nothing_to_overlap(self, capsys: Any) -> None:
        for more in ((), ("--machine", "mesh4", "--simulate")):
            for ranks, said in (("1", True), ("2", False)):
                args = ("run", *SMALL, "--schedule", "serial", "--ranks", ranks, *more)
                out = call(capsys, *args)[1]
                assert ("one rank: nothing is sent, so there is nothing to overlap" in out) is said

    def test_the_table_says_what_is_paced(self, capsys: Any) -> None:
        code, out, _ = call(capsys, "run", *SMALL, "--schedule", "gated_1d")
        assert code == 0
        assert "EMULATED" in out and "gated_1d" in out and "right" in out
        code, out, _ = call(capsys, "run", *SMALL, "--machine", "host", "--schedule", "serial")
        assert code == 0 and "EMULATED" not in out

    def test_a_trace_is_what_perfetto_reads(self, capsys: Any, tmp_path: Path) -> None:
        file = tmp_path / "trace.json"
        code, _, _ = call(
            capsys, "run", *SMALL, "--schedule", "hetero_fused_1d", "--trace", str(file)
        )
        assert code == 0
        events = json.loads(file.read_text())["traceEvents"]
        slices = [event for event in events if event["ph"] == "X"]
        assert {event["pid"] for event in slices} == {0, 1, 2, 3}
        assert any(event["cat"] == "copy" and event["args"]["bytes"] > 0 for event in slices)
        assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
        names = {event["args"]["name"] for event in events if event["ph"] == "M"}
        assert {"rank 0", "compute", "push1"} <= names

    def test_pytorch_computes(self, capsys: Any, torch: Any) -> None:
        code, out, _ = call(capsys, "run", *SMALL, "--compute", "torch", "--schedule", "serial")
        assert code == 0 and "torch" in out

    def test_uneven_rows(self, capsys: Any) -> None:
        code, out, _ = call(capsys, "run", *SMALL, "--ranks", "3", "--rows", "0,60,7", "--json")
        assert code == 0 and all(row["ok"] for row in json.loads(out)["results"])

    @pytest.mark.parametrize("op", ["all_to_all_matmul", "matmul_all_to_all"])
    def test_skewed_and_empty_splits(self, capsys: Any, op: str) -> None:
        code, out, _ = call(
            capsys, "run", op, "--ranks", "3", "--splits", "0,90,0;0,0,0;7,1,0", "--json",
            "--iters", "1", "--machine", "host",
        )  # fmt: skip
        document = json.loads(out)
        assert code == 0 and document["m"] == 98
        assert all(row["ok"] for row in document["results"])

    @pytest.mark.parametrize("mode", ["mean", "weighted"])
    def test_modes_of_bags(self, capsys: Any, mode: str) -> None:
        pooled = ("embedding_all_to_all", "--ranks", "3", "--mode", mode, "--index-dtype", "int32")
        code, out, _ = call(capsys, "run", *pooled, "--iters", "1", "--json")
        assert code == 0 and all(row["ok"] for row in json.loads(out)["results"])
        code, out, _ = call(capsys, "plan", *pooled, "--schedule", "hetero_fused_1d", "--json")
        plan = json.loads(out)
        assert code == 0 and plan["problem"]["modes"] == [[mode, mode]] * 3
        assert plan["problem"]["index_dtype"] == "int32"

    def test_a_wrong_result_is_exit_1(self, capsys: Any, monkeypatch: Any) -> None:
        import ficco.api.node

        right = ficco.api.node.run_lowered

        def wrong(*args: Any) -> Any:
            ys = right(*args)
            ys[1][0][3, 2] += 1
            return ys

        monkeypatch.setattr(ficco.api.node, "run_lowered", wrong)
        code, out, _ = call(capsys, "run", *SMALL, "--json")
        assert code == 1
        assert not any(row["ok"] for row in json.loads(out)["results"])

    def test_a_run_that_times_out_is_exit_1(self, capsys: Any) -> None:
        code, out, err = call(capsys, "run", "--timeout", "0.001", "--schedule", "serial")
        assert code == 1 and out == ""
        assert re.search(r"did not arrive within [\d.]+ m?s\. ", err), err
        assert err.endswith("--timeout is 0.001 s: increase it if the machine is slow\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "--schedule", "fast"], "unknown schedule 'fast'"),
        (["run", "all_gather"], "unknown operator 'all_gather' (did you mean"),
        (["run", "embedding_all_to_all", "--schedule", "uniform_fused_2d"], "cut='rows'"),
        (["run", "--ranks", "0"], "1 to 64"),
        (["run", "--ranks", "9", "--machine", "mesh8"], "'mesh8' has 8"),
        (["run", "--ranks", "65"], "1 to 64"),
        (["run", "--m", "0"], "m=0"),
        (["run", "--m", "many"], "--m 'many': a whole number is needed"),
        (["run", "--grain", "x"], "'x' is neither a whole number nor world"),
        (["plan", "--check", ""], "--check '': the name of the file is empty"),
        (["run", "--dtype", "float64"], "float64"),
        (["run", "--machine", "h200"], "unknown machine"),
        (["run", "--machine", "/no/such.toml"], "cannot be read"),
        (["run", "--grain", "0"], "--grain 0: a whole number from 1 to 256 is needed"),
        (["run", "--iters", "0"], "--iters 0"),
        (["run", "--iters", "1000001"], "--iters 1000001: it must be from 1 to 1,000,000"),
        (["run", "--ranks=--"], "'--'"),  # by newer Pythons' argparse, too
        (["run", "--iters=--"], "'--'"),
        (["run", "--seed=--"], "'--'"),
        (["plan", "--rank=--"], "'--'"),
        (["explain", "--ranks=--"], "'--'"),
        (["run", "--seed", "-1"], "--seed -1"),
        (["run", "--timeout", "-1"], "--timeout=-1.0: a positive number of seconds"),
        (["run", "--rows", "1,2"], "4 numbers"),
        (["run", "--rows", "1,2,3,4", "--m", "11"], "add up to 10"),
        (["run", "--splits", "1,2;3,4"], "--splits is for"),
        (["run", "--mode", "mean"], "--mode is for operators that pool bags"),
        (["run", "--index-dtype", "int32"], "--index-dtype is for operators that pool bags"),
        (["run", "embedding_all_to_all", "--mode", "max"], "'max' found; one of sum, mean"),
        (["run", "embedding_all_to_all", "--index-dtype", "int8"], "index_dtype='int8'"),
        (["run", "all_to_all_matmul", "--splits", "1,2;3,4"], "4 ranks"),
        (
            ["run", "all_to_all_matmul", "--splits", "1,2;3,4", "--ranks", "2", "--m", "9"],
            "--m 9, but --splits add up to 10",
        ),
        (["run", "--regime", "eager"], "--regime eager without --simulate"),
        (["run", "--machine", "h100x2", "--ranks", "4", "--simulate"], "has 2; request fewer"),
        (["run", "all_to_all_matmul", "--splits", "1;2", "--ranks", "2"], "2 numbers"),
        (["run", "--trace", "/no/such/folder/trace"], "--trace"),
        (["run", "--engine", "cuda"], "--engine cuda: libcuda.so.1 not found"),
        (["run", "--machine", "cuda"], "--machine cuda: libcuda.so.1 not found"),
        (["run", "--engine", "cuda", "--machine", "mesh4"], "for the host engine"),
        (["run", "--engine", "host", "--machine", "cuda"], "for the cuda engine"),
        (["run", "--m", "1000000000", "--n", "1000000000", "--k", "1000000000"], "memory"),
        (["plan", "--schedule", "all"], "one --schedule"),
        (["plan", "--rank", "4"], "--rank 4"),
        (["plan", "--check", "/no/such/plan.json"], "--check"),
        (["fly"], "command 'fly' is unknown"),
        ([], "usage"),
    ],
)
def test_bad_arguments_are_exit_2_with_a_reason(capsys: Any, args: list[str], words: str) -> None:
    code, out, err = call(capsys, *args)
    assert code == 2 and out == ""
    assert words in err
    assert "Traceback" not in err


class TestEngines:
    """Which engine a command line means; nothing runs on GPUs here."""

    @pytest.fixture
    def started(self, monkeypatch: Any) -> list[int]:
        """The numbers of ranks that were started as processes."""
        worlds: list[int] = []
        monkeypatch.setattr(run, "launch", lambda world: worlds.append(world) or 0)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        monkeypatch.delenv("FICCO_STORE", raising=False)
        return worlds

    @pytest.mark.parametrize(
        ("devices", "args", "ranks"),
        [
            (2, [], 2),
            (8, [], 8),
            (16, [], 8),
            (8, ["--ranks", "3"], 3),
            (1, ["--engine", "cuda"], 1),
            (4, ["--engine", "cuda", "--processes"], 4),
            (4, ["--machine", "cuda"], 4),
        ],
    )
    def test_gpus_get_a_process_each(
        self, capsys: Any, gpus: Any, started: list[int], devices: int, args: list[str], ranks: int
    ) -> None:
        gpus(devices)
        code, _, err = call(capsys, "run", *args)
        assert code == 0 and started == [ranks], err

    @pytest.mark.parametrize(
        ("devices", "trouble", "args"),
        [
            (0, "", []),
            (1, "", []),
            (8, "PyTorch lacks NCCL", []),
            (8, "", ["--engine", "host"]),
            (8, "", ["--machine", "host"]),
        ],
    )
    def test_else_the_host_engine_runs(
        self, capsys: Any, gpus: Any, started: list[int], devices: int, trouble: str,
        args: list[str],
    ) -> None:  # fmt: skip
        gpus(devices, trouble)
        code, out, err = call(capsys, "run", *SMALL, *args, "--schedule", "serial", "--json")
        assert code == 0 and not started, err
        assert (json.loads(out)["engine"], json.loads(out)["dtype"]) == ("host", "float32")

    @pytest.mark.parametrize(
        ("args", "code", "words"),
        [
            (["--ranks", "5"], 2, "--ranks 5: there are 4 GPUs here"),
            (["--compute", "torch"], 2, "--compute torch: it is for the host engine"),
            (["embedding_all_to_all", "--schedule", "gated_1d"], 2, "works is compute='per_chunk'"),
            (["--schedule", "one_shot_sm"], 2, "shots='two', as in gather_sm"),
            (["--rows", "1,2"], 2, "4 numbers"),
            (["--schedule", "fast"], 2, "unknown schedule"),
        ],
    )
    def test_what_gpus_cannot_run_starts_nothing(
        self, capsys: Any, gpus: Any, started: list[int], args: list[str], code: int, words: str
    ) -> None:
        gpus(4)
        found, out, err = call(capsys, "run", *args)
        assert (found, out, started) == (code, "", []) and words in err

    def test_gpus_that_cannot_serve_are_exit_1(
        self, capsys: Any, gpus: Any, started: list[int]
    ) -> None:
        gpus(4, "these GPUs do not reach each other's memory: 0-1")
        code, _, err = call(capsys, "run", "--engine", "cuda")
        assert code == 1 and not started and "0-1" in err

    def asked(self, *args: str, ranks: int = 4) -> Request:
        import argparse

        parser = argparse.ArgumentParser()
        run.add_to(parser.add_subparsers())
        return request_from(parser.parse_args(["run", *args]), "cuda", ranks)

    @pytest.mark.parametrize("op", OPERATORS)
    def test_all_is_what_gpus_can_run(self, op: str) -> None:
        asked = self.asked(op)
        assert (asked.machine.name, asked.problem.dtype, asked.problem.world) == (
            "cuda", "bfloat16", 4,
        )  # fmt: skip
        names = [schedule.name for schedule in asked.schedules]
        left_out = {reason.split()[0] for reason in asked.refused}
        assert set(names) | left_out == set(Schedule.names(op))
        assert ("gated_1d" in left_out) == (op == "embedding_all_to_all")
        assert asked.schedules[0].transport == "collective" and names[0] == "serial"
        pooled = {"pool_sm", "push_sm"} & set(names)
        assert pooled == {"pool_sm", "push_sm"} & set(Schedule.names(op))
        others = [each for each in asked.schedules[1:] if each.name not in pooled]
        assert all(each.transport == "dma" or each.moves for each in others)

    def test_sizes_that_are_named_stay(self) -> None:
        p = self.asked("--m", "64", "--dtype", "float16").problem
        assert (p.m, p.n, p.k, p.dtype) == (64, 8192, 8192, "float16")


class TestTensors:
    """What results on GPUs are judged by, on tensors of the CPU."""

    @pytest.mark.parametrize("op", OPERATORS)
    def test_the_oracle_takes_tensors(self, torch: Any, op: str) -> None:
        from ficco.measure.executors import TorchDraw

        problem = Problem.chunked(op, 3, 67, 29, 31, "float32", rows=(50, 0, 17))
        given = oracle.inputs(problem, 1, TorchDraw("float32", 1, torch.device("cpu")))
        arrays = [{name: tensor.numpy() for name, tensor in mine.items()} for mine in given]
        exact = oracle.results(problem, arrays)
        for rank in range(3):
            [[want]] = oracle.results(problem, given, [rank])
            [same] = exact[rank]
            assert want.terms == same.terms
            for tensor, array in zip(want[:3], same[:3], strict=True):
                assert torch.allclose(tensor, torch.from_numpy(array), rtol=1e-12, atol=1e-12)
            y = want.value.float()
            assert oracle.judge(y, want, "float32").ok
            if y.numel():
                for wrong in (torch.nan, 1 + float(y[0, 0])):
                    y[0, 0] = wrong
                    assert not oracle.judge(y, want, "float32").ok

    def test_sums_that_a_collective_rounds_may_be_off_by_more(self, torch: Any) -> None:
        problem = Problem.chunked("matmul_reduce_scatter", 8, 512, 64, 256, "bfloat16")
        from ficco.measure.executors import TorchDraw

        given = oracle.inputs(problem, 1, TorchDraw("bfloat16", 1, torch.device("cpu")))
        total = torch.zeros(512, 64, dtype=torch.bfloat16)
        for mine in given:
            total += (mine["x"].float() @ mine["w"].float()).bfloat16()
        [[want]] = oracle.results(problem, given, [0])
        assert oracle.judge(total[:64], want, "bfloat16", roundings=8).ok
        total[3, 3] += 1
        assert not oracle.judge(total[:64], want, "bfloat16", roundings=8).ok


def test_doctor_says_what_is_here_and_what_is_missing(capsys: Any) -> None:
    code, out, _ = call(capsys, "doctor", "--json")
    document = json.loads(out)
    assert code == 0 and document["ok"]
    names = {finding["name"] for finding in document["findings"]}
    assert {"platform", "native core", "numpy", "torch", "CUDA driver", "HIP runtime"} <= names
    code, out, _ = call(capsys, "doctor")
    assert code == 0 and "native core" in out


class TestAsAProgram:
    """In a process of its own: what only the installed command shows."""

    def test_stdout_holds_one_document(self) -> None:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ficco", "run", *SMALL, *HOST, "--json"],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert json.loads(done.stdout)["ranks"] == 4

    def test_plans_pass_through_a_pipe(self) -> None:
        command = f"{sys.executable} -P -m ficco"
        line = f"{command} plan --ranks 2 --json | {command} plan --check -"
        done = subprocess.run(
            line, check=False, shell=True, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0 and done.stdout.startswith("right:"), done.stderr

    def test_a_reader_that_leaves_is_no_traceback(self) -> None:
        line = f"{sys.executable} -P -m ficco plan --ranks 8 --json | head -c 10"
        done = subprocess.run(
            line, check=False, shell=True, capture_output=True, text=True, timeout=120
        )
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr


class TestProcesses:
    """A process per rank."""

    def run(self, *args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "ficco", "run", *HOST, *args],
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def test_every_operator_is_right(self, torch: Any, tmp_path: Path) -> None:
        """In one set of ranks: to start them takes longer than all that they do."""
        given = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ranks = []
        try:
            for rank in range(3):
                files = [tmp_path / f"{name}{rank}.txt" for name in ("said", "told")]
                with files[0].open("w") as said, files[1].open("w") as told:
                    ranks.append(Forked(
                        [EVERY_OPERATOR, tmp_path, rank, 3, *HOST, "--ranks", 3,
                         "--machine", "host", "--m", 515, "--n", 257, "--k", 129,
                         "--iters", 1, "--dtype", "bfloat16", "--json"],
                        said, told, given,
                    ))  # fmt: skip
            codes = [rank.wait(120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert codes == [0, 0, 0], [path.read_text() for path in tmp_path.glob("told*.txt")]
        documents = [json.loads(line) for line in (tmp_path / "said0.txt").open()]
        assert [document["op"] for document in documents] == list(OPERATORS)
        for op, document in zip(OPERATORS, documents, strict=True):
            assert all(row["ok"] for row in document["results"])
            flow, named = registry.get(op).flow, map(Schedule.named, Schedule.names(op))
            names = {each.name for each in named if not (each.stores or sends(each, flow))}
            if op == "embedding_all_to_all":
                names = (names - {"uniform_fused_2d"}) | {"pool_sm"}
            assert {row["schedule"] for row in document["results"]} == names

    def test_a_trace_has_all_ranks_on_one_clock(self, torch: Any, tmp_path: Path) -> None:
        file = tmp_path / "trace.json"
        done = self.run(*SMALL, "--processes", "--ranks", "2", "--schedule", "serial",
                        "--trace", str(file))  # fmt: skip
        assert done.returncode == 0, done.stderr
        slices = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
        assert {event["pid"] for event in slices} == {0, 1}
        for rank in range(2):  # what a rank waits for has been sent before, by the same clock
            arrived = max(e["ts"] for e in slices if e["pid"] != rank and e["cat"] == "copy")
            waits = [e for e in slices if e["pid"] == rank and e["name"] == "wait.whole"]
            assert waits[0]["ts"] + waits[0]["dur"] >= arrived

    def test_under_torchrun(self, torch: Any, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2",
             "-m", "ficco", "run", *HOST, *[a.upper() for a in SMALL[:6]], "--json"],
            capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["ranks"] == 2

    def test_bad_arguments_are_exit_2_once(self, torch: Any) -> None:
        done = self.run("--processes", "--schedule", "fast")
        assert done.returncode == 2 and done.stderr.count("unknown schedule") == 1
        done = self.run(*SMALL, "--processes", "--timeout", "-1")
        assert done.returncode == 2 and "Traceback" not in done.stderr
