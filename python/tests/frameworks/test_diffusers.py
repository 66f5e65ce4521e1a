"""Models of diffusers with small random networks: three steps and an evaluation on an offloaded model give the losses of torch
in memory. The loss is computed of what the model returns, as scripts that train such models do."""

import copy

import diffusers
import pytest
import torch
from peft import LoraConfig

from both_ways import in_memory, offloaded


def unet(**options):
    return diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8, cross_attention_dim=16,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **options)


def plain_unet():
    return diffusers.UNet2DModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))


def autoencoder(kind=diffusers.AutoencoderKL, **options):
    return kind(in_channels=4, out_channels=4, block_out_channels=(32, 64), norm_num_groups=8, down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, **options)


def flux():
    return diffusers.FluxTransformer2DModel(patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16,
                                            num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8])


def stable_diffusion_3():
    return diffusers.SD3Transformer2DModel(sample_size=16, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=4,
                                           caption_projection_dim=32, joint_attention_dim=16, pooled_projection_dim=32, out_channels=4)


def dit():
    return diffusers.DiTTransformer2DModel(sample_size=16, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=4, in_channels=4,
                                           out_channels=8, num_embeds_ada_norm=10, norm_num_groups=4)


def pixart():
    return diffusers.PixArtTransformer2DModel(sample_size=16, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3,
                                              caption_channels=16, in_channels=4, cross_attention_dim=24, out_channels=8, norm_num_groups=4)


def wan():
    return diffusers.WanTransformer3DModel(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
                                           text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32)


def cog():
    return diffusers.CogVideoXTransformer3DModel(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2,
                                                 text_embed_dim=16, num_layers=2, sample_width=16, sample_height=16, sample_frames=8, patch_size=2,
                                                 temporal_compression_ratio=4, max_text_seq_length=7)


def checkpointed(make):
    model = make()
    model.enable_gradient_checkpointing()
    return model


def adapted(make):
    """Adapters beside frozen weights."""
    model = make()
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights="gaussian"))
    return model


IMAGE, VIDEO, TEXT, POOLED, TIMES = (2, 4, 16, 16), (2, 4, 2, 16, 16), (2, 7, 16), (2, 32), torch.tensor([3, 7])


def of_flux(model, x):
    return model(hidden_states=x(2, 16, 4), encoder_hidden_states=x(*TEXT), pooled_projections=x(*POOLED), timestep=TIMES / 10,
                 img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(7, 3)).sample


def of_unet(model, x):
    return model(x(*IMAGE), TIMES, x(*TEXT)).sample


CASES = {
    "UNet": (plain_unet, lambda model, x: model(x(*IMAGE), TIMES).sample),
    "UNet with text": (unet, of_unet),
    "UNet with text, checkpointed": (lambda: checkpointed(unet), of_unet),
    "UNet with text, LoRA": (lambda: adapted(unet), of_unet),
    "autoencoder": (autoencoder, lambda model, x: model(x(*IMAGE), sample_posterior=True).sample),
    "autoencoder by its two halves": (autoencoder, lambda model, x: model.decode(model.encode(x(*IMAGE)).latent_dist.mode()).sample),
    "vector-quantized": (lambda: autoencoder(diffusers.VQModel, num_vq_embeddings=16), lambda model, x: model(x(*IMAGE)).sample),
    "DiT": (dit, lambda model, x: model(x(*IMAGE), timestep=TIMES, class_labels=torch.tensor([1, 2])).sample),
    "PixArt": (pixart, lambda model, x: model(x(*IMAGE), timestep=TIMES, encoder_hidden_states=x(*TEXT),
                                              added_cond_kwargs={"aspect_ratio": None, "resolution": None}).sample),
    "Stable Diffusion 3": (stable_diffusion_3, lambda model, x: model(
        hidden_states=x(*IMAGE), encoder_hidden_states=x(*TEXT), pooled_projections=x(*POOLED), timestep=TIMES).sample),
    "Flux": (flux, of_flux),
    "Flux, checkpointed, LoRA": (lambda: checkpointed(lambda: adapted(flux)), of_flux),
    "Wan": (wan, lambda model, x: model(hidden_states=x(*VIDEO), timestep=TIMES, encoder_hidden_states=x(*TEXT)).sample),
    "CogVideoX": (cog, lambda model, x: model(x(2, 2, 4, 16, 16), x(*TEXT), TIMES).sample)}


@pytest.mark.parametrize("name", CASES)
def test_small_models_train_as_in_memory(tmp_path, name):
    make, output_of = CASES[name]
    torch.manual_seed(0)
    model = make()

    def loss_of(net, step):
        generator = torch.Generator().manual_seed(step)
        torch.manual_seed(step)
        return output_of(net, lambda *shape: torch.randn(shape, generator=generator)).square().mean()

    expected = in_memory(copy.deepcopy(model), loss_of)
    assert offloaded(model, loss_of, tmp_path) == pytest.approx(expected, rel=2e-6)
