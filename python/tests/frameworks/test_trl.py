"""TRL's trainers, whose fused head reads the weight of the output embedding without calling it, with tiny random models."""

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import sluice_offload as sluice
from conftest import budgeted, watch_steps, worst
from sluice_offload.transformers import Trainer
from test_transformers import logs

transformers.utils.logging.set_verbosity_error()

WORDS = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"w{i}" for i in range(4, 64))]


def tokenizer():
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>")


def llama(kind):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=kind == "tied", pad_token_id=0, eos_token_id=1, bos_token_id=2))
    if kind == "LoRA":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model


def words(count, generator):
    return " ".join(WORDS[i] for i in torch.randint(4, len(WORDS), (count,), generator=generator).tolist())


def texts(count):
    generator = torch.Generator().manual_seed(5)
    return Dataset.from_list([{"text": words(6 + i % 5, generator)} for i in range(count)])


def preferences(count):
    generator = torch.Generator().manual_seed(6)
    return Dataset.from_list([{"prompt": words(4, generator), "chosen": " " + words(5, generator), "rejected": " " + words(6, generator)}
                              for _ in range(count)])


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)


def budget(folder, kind):
    """A quarter of the state at most."""
    config = {"placement": {"parameters": "nvme", "optimizer": "nvme"}, "storage": {"paths": [str(folder)], "block_elements": 4096},
              "optimizer": {"overlap": "serial"}}
    return budgeted(config, llama(kind), 80, 112)


def options(folder):
    return {"output_dir": str(folder / "out"), "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 1.0, "lr_scheduler_type": "constant", "logging_steps": 1,
            "report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "bf16": False, "gradient_checkpointing": False}


def constant(optimizer):
    return optimizer, transformers.get_constant_schedule(optimizer)


@pytest.mark.parametrize("kind", ["untied", "tied", "LoRA"])
def test_sft(tmp_path, kind, monkeypatch):
    """Evaluation before the first step included, where nothing looks for gradients."""
    planned = watch_steps(monkeypatch, micro_batches=1)

    def trained(optimizer_of):
        model = llama(kind)
        optimizer = optimizer_of(model)
        made = SFTTrainer(model=model, args=SFTConfig(**options(tmp_path)), train_dataset=texts(12), eval_dataset=texts(3),
                          processing_class=tokenizer(), optimizers=constant(optimizer))
        first = made.evaluate()["eval_loss"]
        made.train()
        return [first, *logs(made, "loss"), made.evaluate()["eval_loss"]], logs(made, "grad_norm"), optimizer
    config = budget(tmp_path, kind)
    config["optimizer"] |= {"clip_norm": 1.0, "clip_epsilon": 1e-6}
    losses, norms, optimizer = trained(lambda model: sluice.offload(model, config, optimizer=adamw(model)))
    expected, expected_norms, _ = trained(adamw)
    assert worst(losses, expected) <= 2e-6 and worst(norms, expected_norms) <= 2e-5
    assert planned == [False, True, True]
    optimizer.close()


@pytest.mark.parametrize("kind", ["tied", "LoRA"])
def test_dpo(tmp_path, kind, monkeypatch):
    """Its Trainer offloads behind DPOTrainer's own beginning, which copies the adapter for the reference."""
    planned = watch_steps(monkeypatch, micro_batches=1)

    class Both(Trainer, DPOTrainer):
        pass

    def trained(trainer, **more):
        model = llama(kind)
        made = trainer(model=model, ref_model=llama(kind) if kind == "tied" else None, args=DPOConfig(**options(tmp_path)),
                       train_dataset=preferences(12), processing_class=tokenizer(), **more)
        made.train()
        return made
    made, expected = trained(Both, sluice=budget(tmp_path, kind)), trained(DPOTrainer)
    assert worst(logs(made, "loss"), logs(expected, "loss")) <= 2e-6
    assert planned == [False, True, True]
    made._sluice.close()


def test_the_copy_of_an_adapter_behind_offload_is_refused(tmp_path):
    """It would be NaN. The test above has the order that works."""
    model = llama("LoRA")
    optimizer = sluice.offload(model, budget(tmp_path, "LoRA"), optimizer=adamw(model))
    with pytest.raises(sluice.ArgumentError, match=r"copy_\(\) reads .*lora_A.* outside of the model's forward"):
        DPOTrainer(model=model, args=DPOConfig(**options(tmp_path)), train_dataset=preferences(4), processing_class=tokenizer(),
                   optimizers=constant(optimizer))
    optimizer.close()
