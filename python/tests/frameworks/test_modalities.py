"""Models of transformers for images beside texts, for speech, for time series and with state spaces, which need configs of their
own: as in test_zoo.py, three steps and an evaluation give the losses of torch in memory."""

import copy

import numpy
import pytest
import torch
import transformers as hf

from both_ways import in_memory, offloaded

hf.utils.logging.set_verbosity_error()

IMAGE_TOKEN, VISION_START = 63, 61
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
        "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
SPEECH = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "conv_dim": (16, 16),
          "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
          "num_feat_extract_layers": 2, "mask_time_prob": 0.5, "mask_time_length": 2, "layerdrop": 0.1}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}


class Inputs:
    """Random ones of a step."""

    def __init__(self, step):
        self.generator = torch.Generator().manual_seed(step)

    def numbers(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def tokens(self, rows, length, end=60):
        return torch.randint(3, end, (rows, length), generator=self.generator)

    def pair(self):
        """An image beside a text."""
        return {"input_ids": self.tokens(3, 8), "pixel_values": self.numbers(3, 3, 16, 16), "return_loss": True}

    def text(self):
        tokens = self.tokens(2, 12)
        return {"input_ids": tokens, "labels": tokens}

    def speech(self):
        return {"input_values": self.numbers(2, 400), "labels": self.tokens(2, 4, 30)}

    def image_in_text(self):
        tokens = self.tokens(2, 24)
        tokens[:, :16] = IMAGE_TOKEN
        return {"input_ids": tokens, "labels": tokens, "pixel_values": self.numbers(2, 3, 16, 16)}

    def patches_in_text(self):
        tokens = self.tokens(1, 12)
        tokens[:, 1], tokens[:, 2:6] = VISION_START, IMAGE_TOKEN
        return {"input_ids": tokens, "labels": tokens, "pixel_values": self.numbers(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]]),
                "attention_mask": torch.ones_like(tokens), "mm_token_type_ids": (tokens == IMAGE_TOKEN).int()}


def qwen2_vl():
    sections = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    return hf.Qwen2VLForConditionalGeneration(hf.Qwen2VLConfig(
        text_config={**TEXT, "num_key_value_heads": 2, "rope_parameters": sections},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2,
                       "temporal_patch_size": 2},
        image_token_id=IMAGE_TOKEN, video_token_id=62, vision_start_token_id=VISION_START, vision_end_token_id=60))


CASES = {
    "CLIP": (lambda: hf.CLIPModel(hf.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)), Inputs.pair),
    "SigLIP": (lambda: hf.SiglipModel(hf.SiglipConfig(text_config=TEXT, vision_config=VISION)), Inputs.pair),
    "BLIP": (lambda: hf.BlipForConditionalGeneration(hf.BlipConfig(
        text_config={**TEXT, "encoder_hidden_size": 32, "is_decoder": True}, vision_config=VISION, projection_dim=16, image_text_hidden_size=16)),
             lambda given: {**given.text(), "pixel_values": given.numbers(2, 3, 16, 16)}),
    "LLaVA": (lambda: hf.LlavaForConditionalGeneration(hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**TEXT), image_token_id=IMAGE_TOKEN,
        vision_feature_layer=-1)), Inputs.image_in_text),
    "Qwen2-VL": (qwen2_vl, Inputs.patches_in_text),
    "Whisper": (lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_mel_bins=16, max_source_positions=32, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1)), lambda given: {"input_features": given.numbers(2, 16, 64), "labels": given.tokens(2, 7)}),
    "wav2vec 2.0": (lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SPEECH)), Inputs.speech),
    "HuBERT": (lambda: hf.HubertForCTC(hf.HubertConfig(**SPEECH)), Inputs.speech),
    "PatchTST": (lambda: hf.PatchTSTForPrediction(hf.PatchTSTConfig(
        num_input_channels=2, context_length=32, patch_length=4, patch_stride=4, prediction_length=8, d_model=32, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=48)),
                 lambda given: {"past_values": given.numbers(2, 32, 2), "future_values": given.numbers(2, 8, 2)}),
    "ViT-MAE": (lambda: hf.ViTMAEForPreTraining(hf.ViTMAEConfig(
        **VISION, decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4, decoder_intermediate_size=48)),
                lambda given: {"pixel_values": given.numbers(2, 3, 16, 16)}),
    "Mamba 2": (lambda: hf.Mamba2ForCausalLM(hf.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, head_dim=16, num_heads=4, n_groups=1, chunk_size=4, pad_token_id=0)),
                Inputs.text),
    "Bamba": (lambda: hf.BambaForCausalLM(hf.BambaConfig(**TEXT, **MAMBA, num_key_value_heads=2, attn_layer_indices=[1])), Inputs.text),
    "two BERTs": (lambda: hf.EncoderDecoderModel(hf.EncoderDecoderConfig.from_encoder_decoder_configs(
        hf.BertConfig(**TEXT), hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True), decoder_start_token_id=1, pad_token_id=0)),
                  Inputs.text)}


@pytest.mark.parametrize("name", CASES)
def test_small_models_train_as_in_memory(tmp_path, name):
    make, inputs = CASES[name]
    torch.manual_seed(0)
    model = make()

    def loss_of(net, step):
        torch.manual_seed(step)
        numpy.random.seed(step)  # masks of speech
        return net(**inputs(Inputs(step))).loss.mean()

    expected = in_memory(copy.deepcopy(model), loss_of)
    assert offloaded(model, loss_of, tmp_path) == pytest.approx(expected, rel=2e-6)
