"""What notebooks show of outputs: every token as it is, tinted by how likely it was, and activations as heat maps."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.requests.captures import FINAL, Captures
from jaxllm.requests.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput, WeightVersionSpan
from jaxllm.requests.shown import MOST_SHOWN, MOST_TOKENS, Axis, OutputList, TableList, heat_map, optional
from jaxllm.research.scores import ScoredCompletion


def entry(probability: float, raw: bytes, rank: int = 1) -> Logprob:
    return Logprob(math.log(probability), rank, raw.decode(errors="replace"), raw)


def output(*steps: dict[int, Logprob], prompt: str | None = '<b>Who & "why"?</b>\n', **fields: object) -> RequestOutput:
    """A request whose completion's chosen tokens are the first of each step."""
    text = b"".join(next(iter(step.values())).token_bytes or b"" for step in steps).decode(errors="replace")
    completion = CompletionOutput(0, text, [next(iter(step)) for step in steps], -1.5, list(steps), "length")
    return RequestOutput("a", prompt, [1, 2, 3], [completion], True, **fields)  # type: ignore[arg-type]


class Spans(HTMLParser):
    """The texts of a page's innermost elements, with their hints and tints; no tag may be left open."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: list[tuple[str, str, float]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "span", "hr", "em", "pre"}, "nothing that runs, and no style for the whole page"
        if tag != "hr":
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        attributes = self.open[-1][1] if self.open else {}
        if attributes.get("title") is not None:
            tint = re.search(r"rgba\(230,120,0,([\d.]+)\)", attributes.get("style") or "")
            self.tokens.append((data, attributes["title"] or "", float(tint[1]) if tint else 0.0))


def test_tokens_are_tinted_by_their_probability_and_tell_the_others() -> None:
    shown = Spans(
        output({7: entry(0.75, b" a<b"), 8: entry(0.25, b"\n", 2)}, {9: entry(0.01, b'"&', 30)})._repr_html_()
    )
    assert shown.text.startswith('<b>Who & "why"?</b>\n a<b"&3 tokens of prompt → 2 tokens, length')
    (first, hint, light), (second, other_hint, strong) = shown.tokens
    assert (first, second) == (" a<b", '"&')
    assert light == pytest.approx(0.6 * 0.25, abs=1e-3) and strong == pytest.approx(0.6 * 0.99, abs=1e-3)
    assert hint == "' a<b': 75 % (log-probability -0.288, rank 1, token 7)\n'\\n': 25 %"
    assert other_hint == "'\"&': 1 % (log-probability -4.605, rank 30, token 9)"


def test_a_character_of_several_tokens_is_shown_once() -> None:
    shown = Spans(output({1: entry(0.5, "é".encode()[:1])}, {2: entry(0.5, "é".encode()[1:])})._repr_html_())
    assert [text for text, _, _ in shown.tokens] == ["·", "é"]


def test_without_log_probabilities_the_text_is_shown_as_it_is() -> None:
    plain = output(prompt="A prompt")
    plain.outputs[0] = CompletionOutput(0, " <i>&amp;</i>", [4, 5], finish_reason="stop")
    shown = Spans(plain._repr_html_())
    assert shown.text == "A prompt <i>&amp;</i>3 tokens of prompt → 2 tokens, stop" and not shown.tokens
    ids_alone = RequestOutput("a", None, [1, 2, 3], [CompletionOutput(0, "", [4, 5], finish_reason="stop")])
    assert Spans(ids_alone._repr_html_()).text == "⟨3 tokens⟩ [4, 5]3 tokens of prompt → 2 tokens, stop"
    nameless = output({4: Logprob(-0.5, 1)})
    assert [text for text, *_ in Spans(nameless._repr_html_()).tokens] == ["⟨4⟩"]


def test_a_prompt_with_log_probabilities_is_tinted_too() -> None:
    asked = output({9: entry(0.5, b" c")}, prompt_logprobs=[None, {2: entry(0.5, b" a")}, {3: entry(1.0, b" b")}])
    tints = [(text, tint) for text, _, tint in Spans(asked._repr_html_()).tokens]
    assert tints == [("⟨1⟩", 0.0), (" a", 0.3), (" b", 0.0), (" c", 0.3)]
    asked.prompt = "An a b"
    assert Spans(asked._repr_html_()).tokens[0] == ("An", "token 1", 0.0), "the text says what no log-probability does"
    asked.prompt = " a b"
    assert Spans(asked._repr_html_()).tokens[0][0] == "⟨1⟩", "a token that begins every text has none"


def test_a_long_text_is_cut_and_several_completions_are_all_shown() -> None:
    long = output(*({5: entry(0.9, b"x")} for _ in range(MOST_TOKENS + 70)))
    assert "… and 70 more tokens" in Spans(long._repr_html_()).text
    long.outputs.append(CompletionOutput(1, " second", [3], finish_reason="stop"))
    assert "…  second" in Spans(long._repr_html_()).text


def test_representations_are_short() -> None:
    one = output({7: entry(0.75, b" a")}, {9: entry(0.01, b" b")}, prompt="word " * 100)
    one.outputs[0].weight_versions = [WeightVersionSpan("1", 0, 1), WeightVersionSpan("2", 1, 2)]
    half = "word " * 6
    assert repr(one) == (
        f"RequestOutput('{half}' … '{half}' -> "
        "CompletionOutput(' a b', 2 tokens, length, log-probability -1.50, weights 1, 2))"
    )
    one.prompt = None
    assert repr(one).startswith("RequestOutput(3 tokens -> ")
    assert repr(EmbeddingOutput([0.0] * 576)) == "EmbeddingOutput(hidden_size=576)"
    score = ScoredCompletion([1], [2, 3], np.array([-0.5, -0.25], np.float32), np.array([1, 1], np.int32), 0)
    assert repr(score) == "ScoredCompletion(total=-0.750, 2 tokens, greedy)"


def test_a_list_of_outputs_shows_each_and_counts_the_rest() -> None:
    many = OutputList([output({7: entry(0.75, b" a")})] * (MOST_SHOWN + 3))
    shown = Spans(many._repr_html_())
    assert len(shown.tokens) == MOST_SHOWN and shown.text.endswith("and 3 more")
    assert many == [output({7: entry(0.75, b" a")})] * (MOST_SHOWN + 3), "it is a list like others"
    assert Spans(OutputList([{"<": 1}])._repr_html_()).text == "{'<': 1}"
    assert Spans(OutputList()._repr_html_()).text == "no outputs"


def rectangles(svg: str) -> list[tuple[str, str]]:
    """The hint and the colour of each cell."""
    root = ElementTree.fromstring(svg)
    cells = root.findall("{http://www.w3.org/2000/svg}rect")
    return [(cell[0].text or "", cell.attrib["fill"]) for cell in cells]


def test_a_heat_map_has_a_cell_for_each_value_on_a_logarithmic_scale() -> None:
    rows, columns = Axis("layer", ["3", "5"]), Axis("position", ["0", "1", "2"])
    values = np.array([[1.0, 10.0, 100.0], [0.0, np.nan, 100.0]])
    cells = rectangles(heat_map("a < b", values, rows, columns))
    assert [hint for hint, _ in cells][:2] == ["layer 3, position 0: 1", "layer 3, position 1: 10"]
    assert [colour for _, colour in cells] == ["#440154", "#21918c", "#fde725", "#440154", "none", "#fde725"]
    assert len(rectangles(heat_map("same", np.ones((1, 3)), Axis("layer", ["0"]), columns))) == 3


def test_a_heat_map_of_many_values_has_cells_of_several() -> None:
    values = np.arange(1.0, 1 + 3 * 300).reshape(3, 300)
    cells = rectangles(heat_map("x", values, Axis("layer", ["0", "1", "2"]), Axis("position", [*map(str, range(300))])))
    assert len(cells) == 3 * 100
    expected = np.sqrt((values[2, 297:].astype(np.float64) ** 2).mean())
    assert cells[-1][0] == f"layer 2, position 297-299: {expected:.4g}"


@pytest.fixture
def captures() -> Captures:
    values = np.random.default_rng(0).standard_normal((4, 3, 8)).astype(np.float32)
    taps = [("residual", 0), ("residual", 2), ("mlp_out", 1), (FINAL, -1)]
    return Captures(taps, np.array([4, 5, 9]), values)


def test_captures_are_shown_as_heat_maps(captures: Captures) -> None:
    first, *maps = re.split("(?=<svg)", captures._repr_html_())
    assert first == "<div>Captures(residual: [0, 2], mlp_out: [1], final; 3 positions)</div>"
    residual, mlp, final = map(rectangles, maps)
    size = math.sqrt(float((captures["residual"][2][1].astype(np.float64) ** 2).mean()))
    assert len(residual) == 2 * 3 and residual[4][0] == f"layer 2, position 5: {size:.4g}"
    assert len(mlp) == len(final) == 3 * 8
    assert mlp[8][0] == f"position 5, channel 0: {abs(captures['mlp_out'][1][1, 0]):.4g}"
    assert (
        "<svg" not in Captures([("residual", 0)], np.zeros(0, np.int64), np.zeros((1, 0, 8), np.float32))._repr_html_()
    )


def test_layers_one_after_the_other_are_a_range() -> None:
    taps = [("residual", layer) for layer in (0, 1, 2, 5, 7, 8)]
    assert repr(Captures(taps, np.zeros(1), np.zeros((6, 1, 2)))) == "Captures(residual: [0-2, 5, 7-8]; 1 positions)"


def test_captures_become_a_dataset(captures: Captures) -> None:
    pytest.importorskip("xarray")
    found = captures.to_xarray()
    assert found["residual"].dims == ("layer", "position", "channel")
    np.testing.assert_array_equal(found["residual"].sel(layer=2, position=9), captures["residual"][2][2])
    np.testing.assert_array_equal(found["mlp_out"].sel(mlp_out_layer=1), captures["mlp_out"][1])
    np.testing.assert_array_equal(found["final"].sel(position=5), captures.final[1])


def test_outputs_become_tables() -> None:
    pytest.importorskip("pandas")
    one = output({7: entry(0.75, b" a"), 8: entry(0.25, b" b", 2)}, {9: entry(0.5, b" c")})
    one.outputs.append(CompletionOutput(1, " d", [4], finish_reason="stop"))
    table = one.to_pandas()
    assert table[["completion", "position", "token_id", "chosen"]].values.tolist() == [
        [0, 0, 7, True], [0, 0, 8, False], [0, 1, 9, True], [1, 0, 4, True],
    ]  # fmt: skip
    assert table["token"].tolist()[:3] == [" a", " b", " c"] and table["token"].isna().tolist()[3]
    assert table["logprob"][:3].tolist() == [math.log(0.75), math.log(0.25), math.log(0.5)]
    assert math.isnan(table["logprob"][3]) and table["rank"].isna().tolist() == [False, False, False, True]
    one.prompt_logprobs = [None, {2: entry(0.5, b" a")}, {3: entry(1.0, b" b")}]
    assert one.to_pandas(prompt=True)["token_id"].tolist() == [1, 2, 3]
    several = TableList([one, one]).to_pandas()
    assert several["output"].tolist() == [0] * 4 + [1] * 4 and len(TableList().to_pandas()) == 0
    score = ScoredCompletion([1], [2, 3], np.array([-0.5, -0.25], np.float32), np.array([1, 4], np.int32), 0)
    assert TableList([score]).to_pandas().values.tolist() == [[0, 0, 2, -0.5, 1], [0, 1, 3, -0.25, 4]]


def test_a_package_that_is_missing_is_named() -> None:
    said = "^to_pandas needs no_such_package, which is not installed: pip install no_such_package$"
    with pytest.raises(ConfigError, match=said):
        optional("no_such_package", "to_pandas")
