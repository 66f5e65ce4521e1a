// The pictures of `sluice bench gpu` and `bench matrix`, drawn from documents as the commands write
// them. tests/tools/cli/plot_cases.py compares the pictures of commands that run without a GPU.
#include "tools/commands/bench_plots.h"

#include <cstddef>
#include <string>
#include <string_view>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace sluice {
namespace {

using PlotDocument = nlohmann::ordered_json;

std::size_t times_drawn(const std::string& picture, std::string_view part) {
  std::size_t count = 0;
  for (std::size_t at = 0; (at = picture.find(part, at)) != std::string::npos; at += part.size())
    ++count;
  return count;
}

TEST(GpuPlot, HasTheFiguresOfTheDocument) {
  const std::string picture = gpu_plot(PlotDocument::parse(R"({
    "gpu": "GPU <1>",
    "training": [
      {"shape": "124M", "place": "no offload", "compute_step_s": 0.4, "t_min_s": 0.1,
       "step_s": {"median": 0.5, "least": 0.25, "most": 1}},
      {"shape": "7B", "place": "NVMe offload", "left_out": "too little memory"}]})"));
  EXPECT_TRUE(picture.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\"")) << picture;
  EXPECT_EQ(times_drawn(picture, "<title>Training steps on GPU &lt;1&gt;</title>"), 1u);
  // The longest mark, 1 s, is 430 wide.
  const auto expect_bar = [&](std::string_view width, std::string_view text) {
    const std::string drawn = picture.substr(0, picture.find(text));
    const std::size_t bar = drawn.rfind("<rect ");
    ASSERT_EQ(times_drawn(picture, text), 1u) << text;
    EXPECT_NE(drawn.find(width, bar), std::string::npos) << drawn.substr(bar);
  };
  expect_bar(R"(width="215.0")",
             "<title>124M, no offload, measured: 0.5 s per step [0.25, 1]</title>");
  expect_bar(R"(width="172.0")",
             "<title>124M, no offload, computation alone: 0.4 s per step</title>");
  expect_bar(R"(width="43.0")", "<title>124M, no offload, T_min: 0.1 s per step</title>");
  EXPECT_EQ(times_drawn(picture, ">7B, NVMe offload</text>"), 1u) << "its row is there";
  EXPECT_EQ(times_drawn(picture, "7B, NVMe offload"), 1u) << "and has no bar";
}

TEST(MatrixPlot, HasTheFiguresOfTheDocument) {
  const std::string picture = matrix_plot(PlotDocument::parse(R"({
    "cells": [
      {"stage": 1, "offload": "all to nvme", "obstacle": "parameters cannot be on storage"},
      {"stage": 3, "offload": "none", "planned": {"step_s": 0.2},
       "measured": {"step_s": 0.25, "steps_s": [0.3, 0.25, 0.24]}}]})"));
  EXPECT_EQ(times_drawn(picture, "<title>"), 3u);
  EXPECT_EQ(
      times_drawn(picture, "<title>stage 3, none, measured: 0.25 s per step [0.24, 0.3]</title>"),
      1u);
  EXPECT_EQ(times_drawn(picture, "<title>stage 3, none, planned: 0.2 s per step</title>"), 1u);
  EXPECT_EQ(times_drawn(picture, "stage 1, all to nvme"), 1u) << "a row without bars";
}

}  // namespace
}  // namespace sluice
