#!/usr/bin/env python3
"""Whether `sluice tune` finds what a grid of settings finds, on an emulated drive whose runs repeat.

    tests/bench/tune_grid.py --sluice BINARY --drive LIBRARY [--results FOLDER] PART ...

A small GPT trains on a drive of 40 MB/s and 2 ms (throttled_drive.cc), which limits every run. The parts go one after the
other, each begins where it was interrupted, and each writes a line per case into FOLDER:

    predict   the planner's step for every point of the grid, and what `tune --dry-run` chooses from five bad configs
    grid      every point, measured once
    again     its five best, in ten rounds
    tune      `sluice tune` from each of the five bad configs
    judge     the five bad configs, what they were tuned to, and the best of the grid, in ten rounds
    report    the verdicts

`predict` comes first, so that its file can be committed before anything is measured. --real-time runs everything under
SCHED_RR: a machine that does other work then changes no figure; the runs use a tenth of a core.
"""

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

CONFIG = {
    "model": {"layers": 8, "heads": 4, "embedding": 128, "context": 16, "vocabulary": 256, "tied_head": False},
    "data": {"file": "text.txt"},
    "batch": {"sequences": 1, "micro_batches": 8, "order": "auto"},
    "activations": "recompute",
    "precision": {"parameters": "bf16"},
    "memory": {"device": "2MiB", "host": "14MiB"},
    "placement": {"parameters": "auto", "optimizer": "auto"},
    "storage": {"backend": "threads", "block_elements": 65536, "queue_depth": 32},
    "optimizer": {"lanes": 8},
    "run": {"steps": 5, "seed": 1, "device": "host", "threads": 2}}
GRID = {"placement.optimizer": ("auto", "nvme"), "storage.block_elements": (16384, 65536, 131072), "optimizer.lanes": (1, 4, 16),
        "storage.queue_depth": (1, 8, 32), "batch.order": ("horizontal", "vertical")}
# Keys that tuning leaves alone. It still has means that the grid lacks: placement.parameters, placement.gradients, and other values of lanes
# and blocks.
KEPT = ["memory", "activations", "batch.sequences", "batch.micro_batches", "optimizer.overlap"]
BAD = {"a block of 4096 elements": {"storage.block_elements": 4096}, "one lane": {"optimizer.lanes": 1},
       "depth 1": {"storage.queue_depth": 1},
       "all on storage": {"placement.parameters": "nvme", "placement.optimizer": "nvme"},
       "horizontal order": {"batch.order": "horizontal", "placement.parameters": "nvme"}}
ROUNDS = 10


class Bench:
    def __init__(self, options):
        self.options = options
        self.work = os.path.abspath(options.work)
        os.makedirs(os.path.join(self.work, "storage"), exist_ok=True)
        os.makedirs(options.results, exist_ok=True)
        with open(os.path.join(self.work, "text.txt"), "w", encoding="ascii") as file:
            file.write("".join(f"{number} times {number} is {number * number}. " for number in range(120)))

    def config(self, settings):
        config = json.loads(json.dumps(CONFIG))
        config["storage"]["paths"] = [os.path.join(self.work, "storage")]
        config["data"]["file"] = os.path.join(self.work, "text.txt")
        for key, value in settings.items():
            section, name = key.split(".")
            config[section][name] = value
        return config

    def run(self, command, config, *arguments):
        """The JSON of a command over `config`, and what it has printed."""
        if isinstance(config, dict):
            with open(os.path.join(self.work, "config.json"), "w", encoding="ascii") as file:
                json.dump(config, file)
            config = "config.json"
        words = ["chrt", "-r", "5"] if self.options.real_time else []
        words += [self.options.sluice, command, config, "--json", "out.json", *arguments]
        environment = {**os.environ, "LD_PRELOAD": self.options.drive, "SLUICE_DRIVE_RATE": "40e6", "SLUICE_DRIVE_LATENCY": "2000",
                       "XDG_CACHE_HOME": os.path.join(self.work, "cache")}
        done = subprocess.run(words, cwd=self.work, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 5:  # too little memory
            return None
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(words)}: {done.stderr}")
        with open(os.path.join(self.work, "out.json"), encoding="utf-8") as file:
            return json.load(file)

    def step_s(self, config):
        """The median of the steps from the third on; None where the config does not fit."""
        report = self.run("train", config, "--quiet")
        return report and statistics.median(step["time_s"] for step in report["steps"][2:])

    def each(self, name, columns, cases, measure):
        """Appends a line for each case that the file lacks. Returns all lines."""
        path = os.path.join(self.options.results, name + ".csv")
        done = {}
        if os.path.exists(path):
            with open(path, encoding="ascii", newline="") as file:
                for row in csv.DictReader(file):
                    done[row["case"]] = row
        with open(path, "a", encoding="ascii", newline="") as file:
            writer = csv.DictWriter(file, ["case", *columns], lineterminator="\n")
            if not done:
                writer.writeheader()
            for case, subject in cases.items():
                if case not in done:
                    done[case] = {"case": case, **dict(zip(columns, measure(subject)))}
                    writer.writerow(done[case])
                    file.flush()
        return done


def seconds(value):
    return "" if value is None else f"{value:.4f}"


def points():
    for values in itertools.product(*GRID.values()):
        yield " ".join(map(str, values)), dict(zip(GRID, values))


def settings_text(settings):
    return " ".join(f"{key}={value}" for key, value in sorted(settings.items()))


def predict(bench):
    def given(settings):
        keep = [word for section in bench.config({}) for word in ("--keep", section)]
        report = bench.run("tune", bench.config(settings), "--dry-run", *keep)
        return [seconds(report["given"]["predicted_s"] if report and not report["given"]["obstacle"] else None)]

    def chosen(settings):
        report = bench.run("tune", bench.config(settings), "--dry-run", *(word for key in KEPT for word in ("--keep", key)))
        best = report["finalists"][0] if report["finalists"] else report["given"]
        return [seconds(report["given"]["predicted_s"]), seconds(best["predicted_s"]), settings_text(best["settings"])]

    bench.each("predictions", ["predicted_s"], dict(points()), given)
    bench.each("predicted_choices", ["given_s", "chosen_s", "settings"], BAD, chosen)


def grid(bench):
    return bench.each("grid", ["step_s"], dict(points()), lambda settings: [seconds(bench.step_s(bench.config(settings)))])


def best_points(bench, count):
    fitting = [row for row in grid(bench).values() if row["step_s"]]
    all_points = dict(points())
    return {row["case"]: all_points[row["case"]] for row in sorted(fitting, key=lambda row: float(row["step_s"]))[:count]}


def rounds(bench, name, configs):
    """Each round has every config once."""
    cases = {f"{number}: {config}": config for number in range(ROUNDS) for config in configs}
    done = bench.each(name, ["step_s"], cases, lambda config: [seconds(bench.step_s(configs[config]))])
    return {config: [float(done[f"{number}: {config}"]["step_s"]) for number in range(ROUNDS)] for config in configs}


def again(bench):
    return rounds(bench, "again", {case: bench.config(settings) for case, settings in best_points(bench, 5).items()})


def tuned_file(bench, name):
    return os.path.join(bench.work, f"tuned_{name.replace(' ', '_')}.json")


def tune(bench):
    def measure(case):
        name, settings = case
        begin = time.monotonic()
        report = bench.run("tune", bench.config(settings), "-o", tuned_file(bench, name), "--seconds", "60",
                           *(word for key in KEPT for word in ("--keep", key)))
        took_s = time.monotonic() - begin
        winner = [report["given"], *report["finalists"]][report["winner"]]
        return [seconds(report["given"]["measured_s"]), seconds(winner["predicted_s"]), seconds(winner["measured_s"]), f"{took_s:.0f}",
                settings_text(winner["settings"])]
    return bench.each("tuned", ["given_s", "predicted_s", "measured_s", "took_s", "settings"],
                      {name: (name, settings) for name, settings in BAD.items()}, measure)


def judge(bench):
    best = statistics_of(again(bench))[0][1]
    configs = {"grid": bench.config(dict(points())[best])}
    for name, settings in BAD.items():
        configs["given: " + name] = bench.config(settings)
        configs["tuned: " + name] = tuned_file(bench, name)
    return rounds(bench, "judge", configs)


def statistics_of(by_config):
    return sorted((statistics.median(times), config) for config, times in by_config.items())


def tenths(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def ratio(above, below):
    ratios = [a / b for a, b in zip(above, below)]
    low, high = tenths(ratios)
    return f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def report(bench):
    rows = grid(bench)
    predicted = bench.each("predictions", ["predicted_s"], {}, None)
    errors = sorted(abs(float(predicted[case]["predicted_s"]) / float(row["step_s"]) - 1) for case, row in rows.items()
                    if row["step_s"] and predicted[case]["predicted_s"])
    print(f"grid: {len(rows)} points, {len(errors)} fit; the model is off by {100 * statistics.median(errors):.1f} % in the median, "
          f"{100 * errors[len(errors) * 9 // 10]:.1f} % at the 9th decile, {100 * errors[-1]:.1f} % at most")
    five = again(bench)
    for step_s, case in statistics_of(five):
        low, high = tenths(five[case])
        print(f"  {case}: {step_s:.4f} [{low:.4f}, {high:.4f}], once {rows[case]['step_s']}")
    runs = judge(bench)
    for name, row in tune(bench).items():
        print(f"{name}: given {statistics.median(runs['given: ' + name]):.4f}, tuned {statistics.median(runs['tuned: ' + name]):.4f}; "
              f"grid / tuned {ratio(runs['grid'], runs['tuned: ' + name])}; given / tuned "
              f"{ratio(runs['given: ' + name], runs['tuned: ' + name])}; predicted {row['predicted_s']}; {row['took_s']} s; {row['settings']}")


PARTS = {part.__name__: part for part in (predict, grid, again, tune, judge, report)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", required=True, type=os.path.abspath)
    parser.add_argument("--drive", required=True, type=os.path.abspath, help="the library that throttled_drive.cc becomes")
    parser.add_argument("--results", default="docs/results/tuning")
    parser.add_argument("--work", default="/dev/shm/sluice_tune_grid", help="folder for storage, in memory or on a quick drive")
    parser.add_argument("--real-time", action="store_true")
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    options = parser.parse_args()
    bench = Bench(options)
    for part in options.parts:
        PARTS[part](bench)


if __name__ == "__main__":
    sys.exit(main())
