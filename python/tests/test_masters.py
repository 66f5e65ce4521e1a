"""The fp32 masters of bf16 parameters are those of the scalar definition in C++, bit for bit, under every placement and policy."""

import copy
import pathlib
import shutil
import struct
import subprocess

import numpy
import pytest
import torch

import sluice_offload as sluice
from conftest import Block, batch, budgeted, moves_as_planned, tiny

# Reads from standard input, in fp32 and fp64 of this machine: the numbers of elements and steps; learning rate, beta1, beta2,
# epsilon, decay; the first masters; for each step the factor of the gradients and the gradients. Writes the last masters.
PROGRAM = r"""
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/optimizer_math.h"

namespace {

template <typename T>
void read(T* values, std::size_t count) {
  if (std::fread(values, sizeof(T), count, stdin) != count) std::exit(1);
}

}  // namespace

int main() {
  std::uint64_t sizes[2];
  double numbers[5];
  read(sizes, 2);
  read(numbers, 5);
  std::vector<float> masters(sizes[0]), gradients(sizes[0]);
  std::vector<sluice::AdamElement> state(sizes[0]);
  read(masters.data(), masters.size());
  for (std::size_t i = 0; i < masters.size(); ++i) state[i] = {masters[i], 0, 0};
  const sluice::AdamOptions options{
      .beta1 = numbers[1], .beta2 = numbers[2], .epsilon = numbers[3], .weight_decay = numbers[4]};
  for (std::uint64_t step = 1; step <= sizes[1]; ++step) {
    double factor = 0;
    read(&factor, 1);
    read(gradients.data(), gradients.size());
    const sluice::AdamCoefficients coefficients =
        sluice::adam_coefficients(options, numbers[0], step, static_cast<float>(factor));
    for (std::size_t i = 0; i < state.size(); ++i)
      state[i] = sluice::adam_element(coefficients, state[i], gradients[i]);
  }
  for (std::size_t i = 0; i < state.size(); ++i) masters[i] = state[i].master;
  return std::fwrite(masters.data(), sizeof(float), masters.size(), stdout) == masters.size() ? 0 : 1;
}
"""
ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    if shutil.which("g++") is None or not (ROOT / "base" / "optimizer_math.h").is_file():
        pytest.skip("no g++, or no source tree: the scalar definition cannot be compiled")
    program = tmp_path_factory.mktemp("oracle") / "masters"
    source = program.with_suffix(".cc")
    source.write_text(PROGRAM, encoding="utf-8")
    subprocess.run(["g++", "-std=c++20", "-O2", "-ffp-contract=off", "-I", str(ROOT), "-I", str(ROOT / "base" / "include"), "-o",
                    str(program), str(source)], check=True)

    def masters(first, gradients, factors, rate, decay):
        """`gradients` and `factors`: one per step."""
        given = struct.pack("<QQddddd", first.numel(), len(factors), rate, 0.9, 0.95, 1e-8, decay) + first.numpy().tobytes()
        for factor, gradient in zip(factors, gradients, strict=True):
            given += struct.pack("<d", factor) + gradient.numpy().tobytes()
        ran = subprocess.run([str(program)], input=given, stdout=subprocess.PIPE, check=True)
        return torch.from_numpy(numpy.frombuffer(ran.stdout, dtype=numpy.float32).copy())
    return masters


@pytest.mark.parametrize("placement, overlap", [("nvme", "serial"), ("nvme", "deferred"), ("nvme", "eager"), ("host", "speculative"),
                                                ("host", "eager"), ("device", "auto")])
def test_masters_are_the_oracles(config, oracle, placement, overlap):
    config["precision"] = {"parameters": "bf16"}
    config["optimizer"] = {"learning_rate": 1e-3, "clip_norm": 0 if overlap == "eager" else 0.7, "weight_decay": 0.01, "overlap": overlap}
    config["placement"] = {"parameters": placement, "optimizer": "host" if placement == "device" else placement}
    config["memory"] = {"device": "4MiB", "host": "16MiB"}  # which hold what is placed in them
    start = tiny(tied=False, width=64, layers=8) if placement == "nvme" else tiny(tied=False)
    if placement == "nvme":
        budgeted(config, start, 300, 500)
    model = copy.deepcopy(start)
    seen = {name: [] for name, _ in start.named_parameters()}
    for name, p in model.named_parameters():  # hooks that come first see the gradient before the engine takes it
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.float().flatten()))
    optimizer = sluice.offload(model, config, units=[Block])
    factors = []
    for step in range(STEPS):
        model(*batch(step)).backward()
        optimizer.step()
        factors.append(optimizer.report.clip_factor)
        optimizer.zero_grad()
        if placement == "nvme" and step > 0:
            if overlap == "serial":
                moves_as_planned(optimizer)
            else:  # an update may go on in the next step
                assert min(optimizer.report.nvme_read_bytes, optimizer.report.nvme_write_bytes) > 0
    assert (min(factors) < 1) == (overlap != "eager")
    engine, units = optimizer._engine, optimizer._walk.units
    members = [member for unit in units.units for member in unit.members]
    assert len(members) == len(seen)
    first = dict(start.named_parameters())
    for member in members:
        decay = 0.01 if member.parameter.dim() >= 2 else 0.0
        expected = oracle(first[member.name].detach().flatten(), seen[member.name], factors, 1e-3, decay)
        actual = engine.read(member, 1).flatten()
        assert torch.equal(actual.view(torch.int32), expected.view(torch.int32)), member.name
    optimizer.close()
