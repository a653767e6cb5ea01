"""Every PNG in figures/ is what the JSON beside it draws, and nothing else lies there."""

import functools
import io
import json
import re
import statistics
from pathlib import Path

import numpy
import pytest
import torch

from paged_attention.bench import figures
from paged_attention.bench.ladder_plot import draw_ladder
from paged_attention.bench.lengths_plot import draw_lengths
from paged_attention.bench.peers import PEERS
from paged_attention.bench.settings import LADDER, Settings
from paged_attention.measure.counting import count
from paged_attention.plots.style import DPI, PEER_MARKS, STAGE_COLOURS
from paged_attention.stages import STAGES

matplotlib_image = pytest.importorskip("matplotlib.image")

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "figures"
LOCAL = FIGURES / "local"  # a user's own
SOURCES = sorted(path for path in FIGURES.rglob("*.json") if LOCAL not in path.parents)
LADDERS = [path for path in SOURCES if path.name == "ladder.json"]

SAME = 1e-5  # of the pixels; a changed digit moves four times as many, see below


def pixels(png):
    return matplotlib_image.imread(png if isinstance(png, Path) else io.BytesIO(png))


def differing(one, other):
    """The share of pixels that anyone could tell apart; 1 if the sizes differ."""
    if one.shape != other.shape:
        return 1.0
    return float((numpy.abs(one - other).max(axis=-1) > 0.2).mean())


def run_of(*contexts, **failures):
    """A ladder run as its JSON would hold it, of made-up numbers."""
    return {
        "kind": "ladder",
        "schema": 1,
        "device": {"type": "cpu", "name": "A Processor", "threads": 2, "cpu_capability": "AVX2"},
        "versions": {"python": "3.12.1", "torch": "2.5.0", "cuda": None, "paged_attention": "0"},
        "shape": {
            "num_seqs": 1,
            "num_heads": 24,
            "num_kv_heads": 4,
            "head_size": 256,
            "block_size": 16,
            "partition_size": 512,
            "dtype": "float32",
            "layout": "vllm",
        },
        "interrupted": False,
        "contexts": [
            {
                "context": context,
                "kv_bytes": 8192 * context,
                "other_cores": 0.0,
                "floor": {"seconds": 4e-7 * context, "num_bytes": 8200 * context},
                "stages": [
                    {"name": name, "failure": failures[name]}
                    if name in failures
                    else {
                        "name": name,
                        "seconds": 3e-5 * context / (place + 1),
                        "spread": [2.8e-5 * context / (place + 1), 3.5e-5 * context / (place + 1)],
                        "peak_bytes": 10_000 * context * (place + 1),
                    }
                    for place, name in enumerate(LADDER)
                ],
            }
            for context in contexts
        ],
    }


def with_peers(run):
    """The same run with predictions and peers: timed, compiled, skipped at length, wrong."""
    others = {
        "dense_sdpa": {"skipped": "InvalidCxxCompiler: No working C++ compiler found in torch"},
        "gather_sdpa": {"failure": "WRONG: off by 0.1, 1e-5 is allowed", "note": ""},
    }
    for entry in run["contexts"]:
        context = entry["context"]
        entry["predicted"] = {
            "BI-V100": {name: [2e-7 * context, 5e-7 * context] for name in STAGES},
            "H200": {name: [3e-8 * context, 4e-8 * context] for name in STAGES},
        }
        entry["peers"] = [
            {"name": name, **others[name]}
            if name in others
            else {
                "name": name,
                "seconds": 9e-7 * context * (place + 1),
                "spread": [8.5e-7 * context * (place + 1), 1e-6 * context * (place + 1)],
                "peak_bytes": None if name == "flex_paged" else 2000 * context,
                "note": "",
            }
            for place, name in enumerate(PEERS)
        ]
    return run


# -- what is committed ---------------------------------------------------------------------------


def load(source):
    return json.loads(source.read_text(encoding="utf-8"))


PICTURES = {
    source.with_name(f"{source.stem}{name}.png"): (source, name)
    for source in SOURCES
    for name in figures.names(load(source))
}


def test_each_picture_lies_beside_its_json_and_each_json_beside_its_picture():
    assert {p for p in FIGURES.rglob("*.png") if LOCAL not in p.parents} == set(PICTURES)
    assert FIGURES / "amd-epyc-avx2" / "ladder.png" in PICTURES  # the one that the README shows


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_committed_picture_is_what_its_json_draws(path):
    source, name = PICTURES[path]
    assert differing(pixels(figures.png(load(source), name)), pixels(path)) <= SAME


# -- drawing -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unchanged():
    return figures.png(run_of(1024))


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run["contexts"][0]["stages"][2].update(seconds=0.01034),
        lambda run: run["contexts"][0]["stages"][0].update(peak_bytes=11_100_000),
        lambda run: run["contexts"][0]["floor"].update(num_bytes=8240 * 1024),
        lambda run: run["versions"].update(torch="2.5.1"),
        lambda run: run["shape"].update(dtype="float16"),
        lambda run: run.update(interrupted=True),
        lambda run: run["contexts"][0].update(predicted={"H200": {"single_tile": [1e-3, 2e-3]}}),
        lambda run: run["contexts"][0].update(other_cores=1.4),
        with_peers,
    ],
)
def test_a_changed_number_is_seen_by_the_comparison(change, unchanged):
    run = run_of(1024)
    change(run)
    assert differing(pixels(figures.png(run)), pixels(unchanged)) > 2 * SAME


def test_the_same_json_gives_the_same_bytes_whatever_the_readers_settings_are(unchanged):
    import matplotlib

    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "savefig.dpi": 30}):
        assert figures.png(json.loads(json.dumps(run_of(1024)))) == unchanged


def test_pictures_are_opaque_and_as_wide_as_a_readme_shows_twice(unchanged):
    image = pixels(unchanged)
    assert image.shape[1] == 1600
    assert image.shape[2] == 3 or image[..., 3].min() == 1.0
    assert image[0, 0, :3].tolist() == [1, 1, 1]  # white, on a dark page too


WORDS = re.compile(r"\S")
NOTHING_WORKED = dict.fromkeys(LADDER, "RuntimeError: nothing worked")


@pytest.mark.parametrize(
    "figure",
    [
        lambda: draw_ladder(run_of(7, 512, 8000)),
        lambda: draw_ladder(run_of(64, naive_loops="WRONG: off by 0.1", single_bmm="OSError: no")),
        lambda: draw_ladder(run_of(64, **NOTHING_WORKED)),
        lambda: draw_ladder(with_peers(run_of(1024, 100_000))),
        lambda: draw_ladder(with_peers(run_of(64, **NOTHING_WORKED))),
        lambda: draw_lengths(run_of(1024, 100_000, naive_loops="WRONG: off by 0.1")),
        lambda: draw_lengths(with_peers(run_of(1024, 8192, 32_768, 100_000))),
    ],
    ids=["three contexts", "failures", "nothing but failures", "peers and predictions"]
    + ["predictions beside failures", "lengths", "lengths with peers"],
)
def test_no_words_are_cut_off_and_none_overlap(figure):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure = figure()
    canvas = FigureCanvasAgg(figure)
    figure.dpi = DPI
    canvas.draw()
    beyond = ticks_beyond_the_limits(figure)
    texts = [t for t in figure.findobj(Text) if t.get_visible() and WORDS.search(t.get_text())]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t not in beyond]
    page = figure.bbox
    for text, box in boxes:
        assert box.x0 >= page.x0 and box.x1 <= page.x1, text
        assert box.y0 >= page.y0 and box.y1 <= page.y1, text
    for i, (text, box) in enumerate(boxes):
        for other, other_box in boxes[i + 1 :]:
            assert not box.overlaps(other_box), (text, other)


def ticks_beyond_the_limits(figure):
    """The labels of a log axis that exist beyond its limits, where they aren't drawn."""
    return {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }


def test_a_line_against_length_goes_through_the_medians_and_says_nothing_of_failures():
    run = with_peers(run_of(64, 8000, single_bmm="RuntimeError: no memory"))
    time, memory = draw_lengths(run).axes
    lines = {line.get_label(): line for line in time.lines}
    timed = {*LADDER, *PEERS} - {"single_bmm", "dense_sdpa", "gather_sdpa"}
    assert set(lines) == {*timed, "floor"}
    for place, entry in enumerate(run["contexts"]):
        for result in entry["stages"] + entry["peers"]:
            if "seconds" in result:
                point = lines[result["name"]].get_xydata()[place]
                assert tuple(point) == (entry["context"], result["seconds"])
    counted = {line.get_label() for line in memory.lines}
    assert counted == {*timed, "K and V"} - {"flex_paged"}  # compiled: not counted


def test_a_single_length_has_no_curve():
    assert figures.names(run_of(64)) == [""]
    assert figures.names(run_of(64, 128)) == ["", "_lengths"]


def test_of_four_contexts_the_ladder_shows_the_shortest_and_the_longest():
    four = draw_ladder(run_of(8192, 1024, 100_000, 32_768))
    titles = [axes.get_title(loc="left") for axes in four.axes[::2]]
    assert titles == ["1,024 tokens", "100,000 tokens"]
    assert len(draw_ladder(run_of(7, 512, 8000)).axes) == 6


def test_a_run_without_floor_is_drawn():
    run = run_of(64, 128)
    run["contexts"][0]["floor"] = None
    assert figures.png(run) and figures.png(run, "_lengths")


def test_predictions_are_hollow_bars_from_low_to_high_and_measurements_are_not():
    run = with_peers(run_of(1024))
    axes, _ = draw_ladder(run).axes
    bars = [tuple(line.get_xdata()) for line in axes.lines]
    for bands in run["contexts"][0]["predicted"].values():
        for band in bands.values():
            assert bars.count(tuple(band)) == len(STAGES)
    marks = [line for line in axes.lines if line.get_marker() not in ("None", None, "")]
    hollow = [line for line in marks if line.get_markerfacecolor() == "white"]
    assert len(hollow) == 2 * len(STAGES)
    assert len(marks) - len(hollow) == len(LADDER) + len(PEERS) - 2  # what was timed


def test_predictions_are_called_predicted_and_only_where_there_are_some():
    from matplotlib.text import Text

    def words(run):
        return " ".join(text.get_text() for text in draw_ladder(run).findobj(Text))

    assert "predicted, not measured" in words(with_peers(run_of(64)))
    assert "predicted" not in words(run_of(64))


def test_each_stage_and_peer_is_told_apart_by_its_colour_or_its_mark():
    assert list(STAGE_COLOURS) == list(LADDER)
    assert len(set(STAGE_COLOURS.values())) == len(LADDER)
    assert list(PEER_MARKS) == list(PEERS)
    marks = [mark for _, mark in PEER_MARKS.values()]
    assert len(set(marks)) == len(PEERS) and "o" not in marks  # the stages'
    for name, (colour, _) in PEER_MARKS.items():
        if name.startswith("paged_attention"):
            assert colour == STAGE_COLOURS["paged_attention"]
        else:
            assert colour not in STAGE_COLOURS.values()


# -- redrawing -----------------------------------------------------------------------------------


def test_redraw_writes_every_picture_beside_its_json_and_leaves_no_older_curve(tmp_path, capsys):
    for name in ("b/second.json", "a/first.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(run_of(64)))
    first, second, curve = (tmp_path / f"{name}.png" for name in ("a/first", "b/second", "c"))
    first.write_bytes(b"old")
    (tmp_path / "c_lengths.png").write_bytes(b"an older run's")
    (tmp_path / "c.json").write_text(json.dumps(run_of(64)))
    assert figures.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{first}\n{second}\n{curve}\n"
    assert [path.read_bytes() for path in (first, second)] == [figures.png(run_of(64))] * 2
    assert len(list(tmp_path.rglob("*.*"))) == 6


def test_redraw_draws_against_length_where_there_are_lengths(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(run_of(64, 128)))
    assert figures.redraw(tmp_path) == [tmp_path / "a.png", tmp_path / "a_lengths.png"]
    drawn = figures.png(run_of(64, 128), "_lengths")
    assert (tmp_path / "a_lengths.png").read_bytes() == drawn


def test_without_matplotlib_a_line_says_what_to_install(tmp_path, capsys, monkeypatch):
    def draws_nothing(run):
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setitem(figures.FIGURES["ladder"], "", draws_nothing)
    (tmp_path / "a.json").write_text(json.dumps(run_of(64)))
    assert figures.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == "Figures need matplotlib: pip install -e .[notebooks]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"kind": "pie"}', "\"kind\" is 'pie'"),
        ("[1]", "bad.json"),
        ("{", "bad.json"),
        ('{"kind": "ladder"}', "bad.json: KeyError: 'contexts'"),
    ],
)
def test_a_json_that_draws_nothing_is_named(text, words, tmp_path, capsys):
    (tmp_path / "bad.json").write_text(text)
    assert figures.main([str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "bad.json" in errors and words in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "bad.png").exists()


def test_a_folder_that_is_none_is_named(tmp_path, capsys):
    assert figures.main([str(tmp_path / "nowhere")]) == 2
    assert figures.main([]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "nowhere is not a folder" in first and "one folder" in second


# -- what the committed ladders say --------------------------------------------------------------

COUNTS = "ops", "gemms", "host_reads", "peak_bytes"
COUNTED = 8192  # tokens, at most; longer ones would take half a minute


@functools.cache
def counted(name, context, settings):
    inputs = settings.inputs([context], device="meta")
    counts = count(lambda: STAGES[name](*inputs, 1.0, partition_size=settings.partition_size))
    return {k: getattr(counts, k) for k in COUNTS}


@pytest.mark.parametrize("path", LADDERS, ids=lambda p: p.parent.name)
def test_a_ladders_medians_are_its_samples_and_its_counts_the_stages(path):
    data = load(path)
    shape = data["shape"]
    sizes = "num_heads", "num_kv_heads", "head_size", "block_size", "partition_size"
    dtype = getattr(torch, shape["dtype"])
    settings = Settings(dtype=dtype, **{k: shape[k] for k in sizes})
    for entry in data["contexts"]:
        assert entry["kv_bytes"] == settings.kv_bytes(entry["context"])
        assert 0 <= entry["floor"]["num_bytes"] - entry["kv_bytes"] < 2 * 16384
        for timed in (entry["floor"], *entry["stages"]):
            median = statistics.median(timed["samples"])
            assert timed["seconds"] == pytest.approx(median, abs=2e-9)  # both are rounded to 1 ns
            if timed.get("name") in STAGES and entry["context"] <= COUNTED:
                counts = counted(timed["name"], entry["context"], settings)
                assert {k: timed[k] for k in COUNTS} == counts


# Of fresh memory, 3 GB a call, which a virtual machine's host takes back between its turns: called
# again at once it takes a third (see cost.seconds_of).
TAKEN_BACK = {("single_bmm", 32_768)}


@pytest.mark.parametrize("path", LADDERS, ids=lambda p: p.parent.name)
def test_a_stage_is_predicted_within_a_factor_of_1_5(path):
    """On the device that was measured, from the profile calibrated in the same run."""
    entries = load(path)["contexts"]
    if "predicted_here" not in entries[0]:
        pytest.skip("measured before predictions for the device itself were kept")
    judged = 0
    for entry in entries:
        for stage in entry["stages"]:
            name, context = stage["name"], entry["context"]
            if context in (8192, 32_768) and name in STAGES and (name, context) not in TAKEN_BACK:
                low, high = entry["predicted_here"][name]
                assert low / 1.5 <= stage["seconds"] <= 1.5 * high, (name, context)
                judged += 1
    assert judged == 2 * len(STAGES) - len(TAKEN_BACK)
