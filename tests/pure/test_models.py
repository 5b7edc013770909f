import pytest
import torch
from torch import nn

from undertow.models import SMALL, ZOO, gpt, resnet50, unet
from undertow.models.alexnet import response_norm


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def build_small(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SMALL[name].build()


# Published, or summed from the published layer sizes.
NUM_PARAMETERS = {
    "mlp": (784 + 1) * 4096 + (4096 + 1) * 4096 + (4096 + 1) * 10,
    "lenet300": 266_610,
    "lenet5": 431_080,
    "alexnet": 60_965_224,
    "vgg16": 138_357_544,
    "resnet50": 25_557_032,
    # The published ResNet-18 has 11,689,512: with a stem of 7x7 and 1,000 classes.
    "resnet18_small": 11_689_512 - 3 * 64 * (49 - 9) - 513 * (1000 - 10),
    "gpt": 124_439_808,
    # Embedding, two layers of four gates with two biases each, output layer: "20 million" in Zaremba et al.
    "lstm": 10_000 * 650 + 2 * 4 * (650 * 650 * 2 + 2 * 650) + 10_000 * (650 + 1),
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_number_of_parameters(name):
    with torch.device("meta"):
        model = ZOO[name].build()
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]


OUTPUT_SHAPES = {
    "mlp": (2, 10),
    "lenet300": (2, 10),
    "lenet5": (2, 10),
    "alexnet": (2, 1000),
    "vgg16": (2, 1000),
    "vgg_small": (2, 10),
    "resnet50": (2, 1000),
    "resnet18_small": (2, 10),
    "unet": (2, 2, 256, 256),
    "gpt": (2, 256, 50257),
    "char_gpt": (2, 64, 65),
    "lstm": (2, 35, 10000),
}


@pytest.mark.parametrize("name", ZOO)
def test_output_shape_at_published_size(name):
    entry = ZOO[name]
    with torch.device("meta"):
        model = entry.build()
    inputs = [value.to("meta") for value in entry.example_inputs(2)]
    assert model(*inputs).shape == OUTPUT_SHAPES[name]


def test_small_zoo_has_the_same_architectures():
    assert list(SMALL) == list(ZOO)
    for name, entry in ZOO.items():
        with torch.device("meta"):
            assert type(SMALL[name].build()) is type(entry.build())


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient(name):
    entry, model = SMALL[name], build_small(name)
    draw = generator()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        output = model(*entry.example_inputs(4, draw))
    loss = entry.loss(output, *entry.example_targets(4, draw))
    assert loss.shape == () and loss.isfinite()
    loss.backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        assert parameter.grad.any(), path


@pytest.mark.parametrize("name", SMALL)
def test_examples_come_from_the_given_generator(name):
    entry = SMALL[name]
    before = torch.get_rng_state()
    for draw in (entry.example_inputs, entry.example_targets):
        for first, second in zip(draw(3, generator()), draw(3, generator()), strict=True):
            assert len(first) == 3
            assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_response_norm_is_the_papers():
    # b_i = a_i / (2 + 1e-4 * sum of a_j^2 for |j - i| <= 2)^0.75
    activations = 30 * torch.randn(2, 9, 3, 3, dtype=torch.float64, generator=generator())
    expected = torch.empty_like(activations)
    for channel in range(9):
        neighbours = activations[:, max(0, channel - 2) : channel + 3]
        expected[:, channel] = activations[:, channel] / (2 + 1e-4 * neighbours.square().sum(1)) ** 0.75
    # A sum of at most five squares and one power: a few dozen roundings.
    torch.testing.assert_close(response_norm()(activations), expected, rtol=32 * 2**-52, atol=0)


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "vgg_small", "gpt", "lstm"])
def test_dropout_acts_in_training_only(name):
    model = build_small(name)
    inputs = SMALL[name].example_inputs(4, generator())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert not torch.equal(model(*inputs), model(*inputs))
        model.eval()
        assert torch.equal(model(*inputs), model(*inputs))


def test_alexnet_groups_convolutions_2_4_and_5():
    with torch.device("meta"):
        model = ZOO["alexnet"].build()
    assert [layer.groups for layer in model.modules() if isinstance(layer, nn.Conv2d)] == [1, 2, 1, 2, 2]


def test_resnet_strides_in_the_3x3():
    with torch.device("meta"):
        model = resnet50()
    assert [stage[0].conv2.stride for stage in model.stages] == [(1, 1), (2, 2), (2, 2), (2, 2)]
    assert {block.conv1.stride for stage in model.stages for block in stage} == {(1, 1)}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_unet_keeps_the_image_size(depth):
    model = unet(in_channels=3, num_classes=5, width=4, depth=depth)
    assert model(torch.randn(2, 3, 24, 40)).shape == (2, 5, 24, 40)


def test_unet_skips_reach_the_output():
    # With the upsampling silenced, nothing but the first level's skip can carry the image to the output.
    model = unet(width=4, depth=2).eval()
    for layer in model.upsampling:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    images = torch.randn(2, 1, 16, 16, generator=generator())
    assert not torch.equal(model(images)[0], model(images)[1])


def test_gpt_ties_embedding_and_output():
    model = build_small("gpt")
    assert model.head.weight is model.token_embedding.weight
    assert [path for path, _ in model.named_parameters() if "embedding" in path or "head" in path] == [
        "token_embedding.weight",
        "position_embedding.weight",
    ]


def test_gpt_does_not_see_the_future():
    model = build_small("gpt").eval()
    tokens = torch.randint(97, (1, 24), generator=generator())
    changed = tokens.clone()
    changed[0, 10] = (tokens[0, 10] + 1) % 97
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert not difference[:10].any()
    assert difference[10:].all()


def test_gpt_starts_with_residual_projections_scaled_by_depth():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = gpt(num_layers=8, width=256, vocabulary=512, context=16)
    # The sample deviation of n normals is off by a share of about 1/sqrt(2n); n >= 65,536, five such shares: 1.4 %.
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.014)
    for block in model.blocks:
        for projection in (block.attention.projection, block.projection):
            assert projection.weight.std().item() == pytest.approx(0.02 / 4, rel=0.014)


def test_gpt_heads_are_64_wide_unless_told():
    with torch.device("meta"):
        assert gpt().blocks[0].attention.num_heads == 12
    with pytest.raises(ValueError, match="width must be a multiple of num_heads; found width 100 and 3 heads"):
        gpt(num_heads=3, width=100)
