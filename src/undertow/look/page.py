"""A Look as one HTML page: the filters of each layer, what triggers them, and by which pixels or characters.

In: a Look. Out: the page's text, in the style of the other pages and protected like them: nothing is loaded, every name
is escaped. Pictures are PNGs inside the page, as large as the screen allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import torch
from torch import nn

from undertow.look.embeddings import embedding_section
from undertow.look.filters import draw_filter
from undertow.look.layers import CONVOLUTIONS, UnitLayer
from undertow.look.looking import LayerView, Look, Sample, UnitView
from undertow.look.page_style import LOOK_STYLE
from undertow.look.pictures import draw_colours, draw_image, draw_signed, is_grey
from undertow.look.text import draw_context
from undertow.look.windows import Window, find_windows
from undertow.report.page import document, section, tile_list

MAX_SHEET = 256  # filters of a first layer that are shown together
FRAMED_SHARE = 0.7  # a box of more of the window than this needs no frame


def render_look(look: Look) -> str:
    """The page."""
    sections = [_header(look), _how_to_read(look)]
    sections += [_layer_section(look, view) for view in look.views]
    page = document(look.title, "".join(sections), style=LOOK_STYLE)
    # A file name may contain bytes that are not text; the page must be written all the same.
    return page.encode("utf-8", "replace").decode("utf-8")


def _header(look: Look) -> str:
    num_units = sum(len(view.units) for view in look.views)
    left_out = look.num_layers - len(look.views)
    what = "stretches of text" if look.form is None else "images"
    tiles = [
        ("Layers", str(len(look.views)), f"{left_out} in between are left out" if left_out else "all that have units"),
        ("Units shown", f"{num_units:,}", "those that stand out most"),
        ("Test examples", f"{look.num_examples:,}", what),
        ("Parameters", f"{look.num_parameters:,}", ""),
    ]
    return (
        f'<header><h1>{escape(look.title)}</h1><p class="verdict">What the network has learned, layer by layer</p>'
        f"{tile_list(tiles)}</header>\n"
    )


def _how_to_read(look: Look) -> str:
    if look.form is None:
        shown = (
            "Each unit of a layer is shown with the places of the test text at which it responds most. The character "
            "where it does is underlined. A character is marked the more, the longer the derivative of the response by "
            "its embedding is: a change of it would change the response most (Li et al., 2016)."
        )
    else:
        shown = (
            "Each unit of a layer is shown with its weights, the test images that it responds to most (Zeiler and "
            "Fergus, 2014), and below each the derivative of that response by the pixels (Simonyan, Vedaldi and "
            "Zisserman, 2014). A unit of a convolution sees a part of the image: its window is shown, and a frame is "
            "around what it sees where that is smaller. Below each pair are the image's class and the response. For "
            "grey images in three channels, the derivative is that by the grey pixel: the sum over the channels."
        )
    method = (
        "The derivative is Undertow's own backward pass, as it is: nothing is cut off at the ReLUs, as guided "
        "backpropagation does. A response is taken before the ReLU and after batch normalisation. The units shown are "
        "those whose strongest response is most deviations above their mean."
    )
    if look.input_name:
        shown += f" Of the inputs of the model, {look.input_name} is shown; the others are those of the same example."
    legend = ""
    if look.form is not None:
        legend = (
            '<ul class="legend"><li><i class="key-more"></i>brighter here: more response; a positive weight</li>'
            '<li><i class="key-less"></i>brighter here: less response; a negative weight</li></ul>'
        )
    return f'<p class="reading">{shown}</p><p class="note">{method}</p>{legend}\n'


def _layer_section(look: Look, view: LayerView) -> str:
    layer = view.layer
    title = f"{layer.path or '(model)'} · {layer.kind}"
    if layer.is_embedding:
        return section(title, embedding_section(layer, look.vocabulary))
    parts = [f'<p class="note">{_about(layer)}</p>', _sheet(look, layer)]
    if not view.units:
        parts.append('<p class="note">Its output is not one of each example, so no example triggers it.</p>')
    elif look.form is None:
        parts.append(f'<div class="units texts">{"".join(_text_card(look, view, item) for item in view.units)}</div>')
    else:
        parts.append(f'<div class="units">{"".join(_image_cards(look, view))}</div>')
    return section(title, *parts)


def _about(layer: UnitLayer) -> str:
    weight = getattr(layer.module, "weight", None)
    sizes = "" if not isinstance(weight, torch.Tensor) else " × ".join(map(str, weight.shape[1:]))
    unit = "filters" if isinstance(layer.module, CONVOLUTIONS) else "units"
    after = "" if layer.reader in (None, layer.module) else ", read after batch normalisation"
    return f"{layer.num_units:,} {unit}{f' of {sizes} weights' if sizes else ''}{after}"


def _sheet(look: Look, layer: UnitLayer) -> str:
    """All filters of a first layer, whose weights belong to pixels."""
    if not layer.reads_input or look.form is None or not isinstance(layer.module, (*CONVOLUTIONS, nn.Linear)):
        return ""
    pictures = []
    for unit in range(min(layer.num_units, MAX_SHEET)):
        address, _ = draw_filter(layer, unit, look.form.shape)
        pictures.append(f'<img src="{address}" alt="filter {unit}" title="filter {unit}">')
    rest = layer.num_units - len(pictures)
    note = f'<p class="note">{rest:,} more are left out.</p>' if rest else ""
    return f'<figure class="sheet">{"".join(pictures)}</figure>{note}'


def _image_cards(look: Look, view: LayerView) -> list[str]:
    assert look.form is not None
    samples = [sample for item in view.units for sample in item.samples]
    gradients = look.form.shaped(torch.stack([sample.gradient for sample in samples if sample.gradient is not None]))
    images = look.form.visible(torch.stack([sample.inputs for sample in samples]))
    windows = find_windows(gradients)
    # Where all channels are the same pixel, the derivative by that pixel is the sum over them.
    grey = is_grey(images)
    cards, index = [], 0
    for item in view.units:
        cells = []
        for sample in item.samples:
            window = windows[index]
            cells.append(_image_cell(look, sample, window, images[index], gradients[index], grey))
            index += 1
        cards.append(_card(look, view, item, f'<div class="samples">{"".join(cells)}</div>'))
    return cards


def _image_cell(
    look: Look, sample: Sample, window: Window, image: torch.Tensor, gradient: torch.Tensor, grey: bool
) -> str:
    cut = window.cut(gradient)
    derivative = draw_signed(cut.sum(0)) if grey else draw_colours(cut)
    label = _class_name(look, sample.target)
    about = f"test example {sample.example}{f', {label}' if label else ''}: {sample.response:.3g}"
    frame = ""
    top, left, height, width = window.box
    if 0 < height * width <= FRAMED_SHARE * window.height * window.width:
        frame = (
            f'<i style="left:{100 * (left - window.left) / window.width:.2f}%;'
            f"top:{100 * (top - window.top) / window.height:.2f}%;"
            f'width:{100 * width / window.width:.2f}%;height:{100 * height / window.height:.2f}%"></i>'
        )
    shown = draw_image(window.cut(image))
    return (
        f'<div title="{escape(about)}"><span><img src="{shown}" alt="{escape(about)}">{frame}</span>'
        f'<span><img src="{derivative}" alt="derivative of this response by the pixels"></span>'
        f"<small>{escape(label)} <b>{sample.response:.3g}</b></small></div>"
    )


def _text_card(look: Look, view: LayerView, item: UnitView) -> str:
    lines = "".join(draw_context(sample, look.vocabulary) for sample in item.samples)
    return _card(look, view, item, f'<div class="contexts">{lines}</div>')


def _card(look: Look, view: LayerView, item: UnitView, body: str) -> str:
    address, shows = draw_filter(view.layer, item.unit, None if look.form is None else look.form.shape)
    filter_picture = f'<img src="{address}" alt="{escape(shows)}">' if address else ""
    return (
        f'<article><div class="filter">{filter_picture}<div><h3>{escape(look.label(view, item.unit))}</h3>'
        f"<small>{escape(shows)}</small></div></div>{body}</article>"
    )


def _class_name(look: Look, target: int | None) -> str:
    if target is None:
        return ""
    classes: Sequence[str] = look.classes or ()
    return classes[target] if 0 <= target < len(classes) else str(target)
