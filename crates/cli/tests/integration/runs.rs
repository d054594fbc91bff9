//! What may happen to a run from outside: signals, other runs, kills, and what its user wants next.

#![cfg(unix)]

use crate::common::{Place, send, terminal, text, wait};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

/// A run that reports each of its steps.
const RUN: [&str; 15] = [
    "train",
    "--model",
    "base",
    "--data",
    "data",
    "--learning-rate",
    "1e-2",
    "--report-every",
    "1",
    "--eval-every",
    "0",
    "--no-plot",
    "--no-tensorboard",
    "--rank",
    "2",
];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&RUN[..], more].concat()
}

/// The kinds and steps of the events in a run's log.
fn log(place: &Place, run: &str) -> Vec<(String, u64)> {
    place
        .read(&format!("{run}/metrics.jsonl"))
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|event| {
            (event["event"].as_str().unwrap().to_string(), event["step"].as_u64().unwrap())
        })
        .collect()
}

#[test]
fn a_run_under_nohup_outlives_its_terminal() {
    let place = Place::with_model();
    let arguments = with(&["--steps", "200", "--json"]);
    let child = place.start(&arguments, &[libc::SIGHUP]);
    place.wait_for_steps("adapters", 3);
    send(&child, libc::SIGHUP);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&summary["outcome"], &summary["step"]), (&"finished".into(), &200.into()));

    // Without it a closed terminal ends the run, with a checkpoint.
    let arguments = with(&["--steps", "100000", "-o", "second"]);
    let child = place.start(&arguments, &[]);
    place.wait_for_steps("second", 3);
    send(&child, libc::SIGHUP);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(place.path("second/checkpoints").is_dir());
}

#[test]
fn a_second_run_in_a_folder_is_refused_and_a_dead_ones_folder_is_free() {
    let place = Place::with_model();
    let mut first = Running(place.start(&with(&["--steps", "100000", "--save-every", "0"]), &[]));
    place.wait_for_steps("adapters", 3);
    for flags in [&["--steps", "3"][..], &["--steps", "3", "--overwrite"]] {
        let stderr = place.fails(1, &with(flags));
        assert!(stderr.contains("in use by another run"), "{stderr}");
        assert!(stderr.contains(&format!("process {} on", first.0.id())), "{stderr}");
    }
    assert!(first.0.try_wait().unwrap().is_none(), "the first run goes on");
    drop(first);

    // It ended before its first checkpoint: there is nothing to resume, and nothing in the way.
    let stderr = place.fails(1, &["train", "--resume", "-q"]);
    assert!(stderr.contains("--resume=auto"), "{stderr}");
    let summary = place.json(&with(&["--steps", "3", "--json", "-q"]));
    assert_eq!(summary["step"], 3);
    let steps: Vec<u64> =
        log(&place, "adapters").iter().filter(|event| event.0 == "train").map(|e| e.1).collect();
    assert_eq!(steps, [1, 2, 3]);
}

#[test]
fn one_command_starts_resumes_and_extends_a_run() {
    let place = Place::with_model();
    let run = |steps, more: &[&str]| {
        let output = place.run(&[&with(&["--steps", steps, "--resume=auto"])[..], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    assert!(!run("4", &[]).contains("Going on"));
    let result = || std::fs::read(place.path("adapters/adapter_model.safetensors")).unwrap();
    let (first, first_log) = (result(), log(&place, "adapters"));
    // Another start of the same finds that all is done.
    let stderr = run("4", &[]);
    assert!(stderr.contains("Going on after step 4 of 4"), "{stderr}");
    assert!(result() == first);
    assert_eq!(log(&place, "adapters"), first_log);

    let stderr = run("6", &[]);
    assert!(stderr.contains("The run was of 4 steps"), "{stderr}");
    assert!(stderr.contains("learning rates of a run of 6 steps"), "{stderr}");
    let events = log(&place, "adapters");
    let expected: Vec<(String, u64)> = (1..=4)
        .map(|step| ("train", step))
        .chain([("evaluation", 4), ("train", 5), ("train", 6)])
        .chain([("evaluation", 6), ("checkpoint", 6), ("finished", 6)])
        .map(|(event, step)| (event.to_string(), step))
        .collect();
    assert_eq!(events, expected);
    assert!(result() != first);
    let stderr = place.fails(1, &with(&["--steps", "5", "--resume"]));
    assert!(stderr.contains("total_steps was 6 and is now 5"), "{stderr}");
}

#[test]
fn a_damaged_checkpoint_is_told_of_and_the_one_before_is_taken() {
    let place = Place::with_model();
    place.ok(&with(&["--steps", "4", "--save-every", "2", "-q"]));
    let before = std::fs::read(place.path("adapters/adapter_model.safetensors")).unwrap();
    let state = place.path("adapters/checkpoints/step-00000004/trainer_state.json");
    std::fs::remove_file(&state).unwrap();
    let output = place.run(&["train", "--resume"]);
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("step-00000004/trainer_state.json"), "{stderr}");
    assert!(stderr.contains("Going on after step 2 of 4"), "{stderr}");
    assert!(state.is_file());
    let after = std::fs::read(place.path("adapters/adapter_model.safetensors")).unwrap();
    assert!(before == after);
}

/// A run told to go on from an earlier checkpoint goes on from there, wherever it is killed meanwhile.
#[test]
fn going_back_that_is_broken_off_is_made_up_for() {
    let place = Place::with_model();
    let result = |run: &str| {
        let adapter = place.path(&format!("{run}/adapter_model.safetensors"));
        std::fs::read(adapter).unwrap()
    };
    let copy = |run: &str| {
        let mut copy = Command::new("cp");
        copy.arg("-r").arg(place.path("old")).arg(place.path(run));
        assert!(copy.status().unwrap().success());
    };
    place.ok(&with(&["--steps", "6", "--save-every", "1", "--keep", "9", "-q", "-o", "old"]));
    let back = |run: &str| {
        let checkpoint = format!("{run}/checkpoints/step-00000002");
        place.run(&["train", "--resume", &checkpoint, "--steps", "8", "-o", run])
    };
    copy("whole");
    let output = back("whole");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!place.read("whole/train_config.yaml").contains("resume_from"));

    // Ended where the logs are to be taken back, as a folder stands where the log should.
    copy("late");
    let (log_file, aside) = (place.path("late/metrics.jsonl"), place.path("aside"));
    std::fs::rename(&log_file, &aside).unwrap();
    std::fs::create_dir(&log_file).unwrap();
    assert!(!back("late").status.success());
    std::fs::remove_dir(&log_file).unwrap();
    std::fs::rename(&aside, &log_file).unwrap();
    assert!(!place.path("late/checkpoints/step-00000003").exists());
    // Ended after the settings were written, and nothing else.
    copy("early");
    let settings = place.read("late/train_config.yaml");
    assert!(settings.contains("resume_from: checkpoints/step-00000002"), "{settings}");
    let settings = settings.replace("output: late", "output: early");
    place.write("early/train_config.yaml", &settings);

    for (run, resume) in [("late", "--resume"), ("early", "--resume=auto")] {
        let output = place.run(&["train", resume, "-o", run]);
        let stderr = text(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        assert!(stderr.contains("Going on after step 2 of 8"), "{stderr}");
        assert!(result(run) == result("whole"), "{run}");
        // Checkpoints are written beside the steps that follow, and told of when they are there.
        let [mut found, mut expected] = [run, "whole"].map(|run| log(&place, run));
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{run}");
        assert!(!place.read(&format!("{run}/train_config.yaml")).contains("resume_from"));
    }
}

/// A run that goes on in another folder needs the first one no more.
#[test]
fn a_run_that_is_killed_on_its_way_into_another_folder_finds_back() {
    let place = Place::with_model();
    place.ok(&with(&["--steps", "4", "--save-every", "2", "-q", "-o", "old"]));
    place.ok(&["train", "--resume", "old", "--steps", "6", "-q", "-o", "new"]);
    let settings = place.read("new/train_config.yaml");
    assert!(!settings.contains("resume_from"), "{settings}");
    assert!(place.path("new/checkpoints/step-00000004").is_dir());
    // As it is when nothing but the settings is there.
    let from = place.path("old/checkpoints/step-00000004").canonicalize().unwrap();
    let settings = settings.replace("output: new", "output: third");
    place.write("third/train_config.yaml", &format!("{settings}resume_from: {}\n", from.display()));
    let stderr = place.fails(2, &["train", "-c", "third/train_config.yaml"]);
    assert!(stderr.contains("resume_from") && stderr.contains("--resume"), "{stderr}");
    let output = place.run(&["train", "--resume", "-o", "third"]);
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("Going on after step 4 of 6"), "{stderr}");
    let result =
        |run: &str| std::fs::read(place.path(run).join("adapter_model.safetensors")).unwrap();
    assert!(result("third") == result("new"));
}

#[test]
fn a_bad_line_in_a_log_is_set_aside_and_the_run_goes_on() {
    let place = Place::with_model();
    place.ok(&with(&["--steps", "2", "-q"]));
    for (count, (resume, steps)) in [("--resume", "3"), ("--resume=auto", "4")].iter().enumerate() {
        let content = place.read("adapters/metrics.jsonl") + "junk\n";
        place.write("adapters/metrics.jsonl", &content);
        let output = place.run(&with(&["--steps", steps, resume]));
        let stderr = text(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        let aside = ["metrics.jsonl.damaged", "metrics.jsonl.damaged-2"][count];
        assert!(stderr.contains("not an event") && stderr.contains(aside), "{stderr}");
        assert_eq!(place.read(&format!("adapters/{aside}")), content);
    }
    let steps: Vec<u64> = log(&place, "adapters")
        .into_iter()
        .filter_map(|(event, step)| (event == "train").then_some(step))
        .collect();
    assert_eq!(steps, [1, 2, 3, 4]);
}

#[test]
fn a_configuration_may_be_a_file_of_the_working_folder() {
    let place = Place::with_model();
    let train = ["train", "--from-config", "config.json", "--fine-tune-type", "full"];
    let more = ["--data", "../data", "--output", "../new", "--steps", "1", "-q"];
    let mut command = place.command(&[&train[..], &more].concat());
    let output = command.current_dir(place.path("shape")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(place.path("new/tokenizer.json").is_file());
}

#[test]
fn paths_of_a_runs_settings_are_named_in_another_folder() {
    let place = Place::with_model();
    place.ok(&with(&["--steps", "1", "-q"]));
    std::fs::create_dir(place.path("elsewhere")).unwrap();
    let resume = ["train", "--resume", "--output", "../adapters"];
    let mut command = place.command(&resume);
    let output = command.current_dir(place.path("elsewhere")).output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("data is from the settings of the run (../adapters/train_config"),
        "{stderr}"
    );
    assert!(stderr.contains("or give --data"), "{stderr}");
}

#[test]
fn a_file_that_may_not_grow_is_an_error_that_says_how_to_go_on() {
    let place = Place::with_model();
    place.ok(&with(&["--steps", "2", "-q"]));
    let newest = place.path("adapters/checkpoints/step-00000002");
    let size = std::fs::metadata(newest.join("optimizer.safetensors")).unwrap().len();
    let mut command = place.command(&["train", "--resume", "--steps", "4"]);
    // SAFETY: `setrlimit` may be called between fork and exec, and gets a structure of its own.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: size - 1, rlim_max: size - 1 };
            libc::setrlimit(libc::RLIMIT_FSIZE, &limit);
            Ok(())
        });
    }
    let output = command.output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("checkpoints/step-00000004/optimizer.safetensors"), "{stderr}");
    assert!(stderr.contains("train --resume --output adapters goes on"), "{stderr}");
    place.ok(&["train", "--resume", "-q"]);
}

#[test]
fn an_evaluation_that_a_longer_run_would_not_have_is_told_of() {
    let place = Place::with_model();
    let best = |more: &[&str]| {
        let output = place.run(&[&with(&["--keep-best", "--resume=auto"])[..], more].concat());
        let stderr = text(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        stderr.contains("The evaluation after step 2 counts for --keep-best")
    };
    assert!(!best(&["--steps", "2"]));
    assert!(best(&["--steps", "4"]));
    assert!(!best(&["--steps", "4"]));
}

/// However far the removal of an earlier run came, nothing of that run is taken for the new one's.
#[test]
fn overwriting_that_is_broken_off_leaves_nothing_of_the_old_run_to_resume() {
    let place = Place::with_model();
    place.ok(&with(&["--steps", "2", "-q"]));
    // A folder where a file is expected ends the removal there.
    let names = ["adapter_config.json", "metrics.jsonl", "loss.svg"];
    for name in names {
        let obstacle = place.path("adapters").join(name);
        if obstacle.is_file() {
            std::fs::rename(&obstacle, place.path("saved")).unwrap();
        }
        std::fs::create_dir(&obstacle).unwrap();
        let again = with(&["--steps", "2", "-q", "--seed", "1", "--overwrite"]);
        let stderr = place.fails(1, &again);
        assert!(stderr.contains(name) && stderr.contains("cannot be removed"), "{stderr}");
        assert!(!place.path("adapters/checkpoints").exists(), "{name}");
        assert!(!place.path("adapters/adapter_model.safetensors").exists(), "{name}");
        let stderr = place.fails(1, &["train", "--resume", "-q"]);
        assert!(stderr.contains("has no checkpoint"), "{stderr}");
        std::fs::remove_dir(&obstacle).unwrap();
        // The settings of the new run are there with the new run.
        assert!(place.read("adapters/train_config.yaml").contains("seed: 0"), "{name}");
        place.ok(&again);
        assert!(place.read("adapters/train_config.yaml").contains("seed: 1"), "{name}");
        place.ok(&with(&["--steps", "2", "-q", "--overwrite"]));
    }
    // A model that is nobody's run is not removed.
    place.write("mine/config.json", "{}");
    let full = ["train", "--from-config", "shape", "--fine-tune-type", "full", "-d", "data"];
    let stderr = place.fails(2, &[&full[..], &["-o", "mine", "--overwrite"]].concat());
    assert!(stderr.contains("no run has left there"), "{stderr}");
}

#[test]
fn what_no_run_has_left_in_a_folder_stays() {
    let place = Place::with_model();
    let mine = ["metrics.jsonl", "loss.png", "tensorboard/other/events", "checkpoints/mine/a.pt"];
    mine.iter().for_each(|name| place.write(&format!("mine/{name}"), "mine"));
    for more in [&[][..], &["--overwrite"]] {
        let arguments = [&["--steps", "1", "-q", "-o", "mine"], more].concat();
        let stderr = place.fails(2, &with(&arguments));
        let expected = "mine holds metrics.jsonl, loss.png, which no run has left there";
        assert!(stderr.contains(expected), "{stderr}");
    }
    // Nor does another program's file of settings make a run of it.
    place.write("mine/train_config.yaml", "lr: 3");
    let stderr = place.fails(2, &with(&["--steps", "1", "-q", "-o", "mine"]));
    assert!(stderr.contains("train_config.yaml, which no run has left there"), "{stderr}");
    assert_eq!(place.read("mine/train_config.yaml"), "lr: 3");
    mine.iter().for_each(|name| assert_eq!(place.read(&format!("mine/{name}")), "mine"));
    // What TensorBoard is told to watch before there is a run is in nobody's way.
    std::fs::create_dir_all(place.path("watched/tensorboard")).unwrap();
    place.ok(&with(&["--steps", "1", "-q", "-o", "watched"]));

    // What stands beside a run's files does so, too, as a model beside an adapter.
    let beside = [
        "checkpoints/mine/a.pt",
        "tensorboard/mine/events",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ];
    beside.iter().for_each(|name| place.write(&format!("run/{name}"), "mine"));
    place.ok(&with(&["--steps", "2", "-q", "-o", "run"]));
    place.write("run/tensorboard/events.out.tfevents.1", "");
    place.ok(&with(&["--steps", "1", "-q", "-o", "run", "--overwrite"]));
    beside.iter().for_each(|name| assert_eq!(place.read(&format!("run/{name}")), "mine"));
    assert!(!place.path("run/tensorboard/events.out.tfevents.1").exists());
    assert!(!place.path("run/checkpoints/step-00000002").exists());
    assert!(place.path("run/checkpoints/step-00000001").exists());
    // A run that would write a model doesn't take that one's place.
    let full = ["train", "-d", "data", "-m", "base", "--fine-tune-type", "full", "--steps", "1"];
    let stderr = place.fails(2, &[&full[..], &["-q", "-o", "run", "--overwrite"]].concat());
    assert!(stderr.contains("model.safetensors, config.json, which no run has left"), "{stderr}");
    beside.iter().for_each(|name| assert_eq!(place.read(&format!("run/{name}")), "mine"));

    // A whole model that a run has left is as precious as an adapter, whatever follows.
    place.ok(&[&full[..], &["-q", "-o", "whole"]].concat());
    std::fs::remove_dir_all(place.path("whole/checkpoints")).unwrap();
    let stderr = place.fails(2, &with(&["--steps", "1", "-q", "-o", "whole"]));
    assert!(stderr.contains("whole holds a run already"), "{stderr}");
    assert!(place.path("whole/model.safetensors").is_file());
}

#[test]
fn rows_that_a_resumed_run_keeps_against_its_file_are_told_also_where_little_is() {
    let place = Place::with_model();
    place.write("run.yaml", "batch_size: 2\n");
    place.ok(&with(&["-c", "run.yaml", "--steps", "2", "-q"]));
    place.write("run.yaml", "batch_size: 1\n");
    let output = place.run(&with(&["-c", "run.yaml", "--resume=auto", "--steps", "3", "-q"]));
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("warning: batch_size is 2 in place of 1"), "{stderr}");
}

#[test]
fn checkpoints_may_lie_behind_a_link() {
    let place = Place::with_model();
    std::fs::create_dir_all(place.path("large/kept")).unwrap();
    std::fs::create_dir(place.path("run")).unwrap();
    std::os::unix::fs::symlink("../large/kept", place.path("run/checkpoints")).unwrap();
    let steps = |steps, more: &[&'static str]| [&["--steps", steps, "-q"], more].concat();
    place.ok(&with(&steps("2", &["-o", "run"])));
    let checkpoint = "run/checkpoints/step-00000002";
    // By its name, whose run is where that says, and not where the link leads.
    place.ok(&with(&steps("3", &["--resume", checkpoint])));
    assert!(place.path("large/kept/step-00000003").is_dir());
    let begins = ["-o", "run", "--overwrite", "--init-adapter", "run/checkpoints/step-00000003"];
    let stderr = place.fails(2, &with(&steps("1", &begins)));
    assert!(stderr.contains("init_adapter: ") && stderr.contains("choose another"), "{stderr}");
    place.ok(&with(&steps("1", &["-o", "run", "--overwrite"])));
    assert!(!place.path("large/kept/step-00000003").exists());
    assert!(place.path("large/kept/step-00000001").is_dir());
}

#[test]
fn what_a_run_begins_with_is_not_overwritten() {
    let place = Place::with_model();
    place.ok(&with(&["--steps", "1", "-q", "-o", "first"]));
    let again = ["--steps", "1", "-q", "--init-adapter", "first", "-o", "first", "--overwrite"];
    let stderr = place.fails(2, &with(&again));
    assert!(stderr.contains("init_adapter: ") && stderr.contains("choose another"), "{stderr}");
    assert!(place.path("first/adapter_model.safetensors").is_file());
    assert!(place.path("first/checkpoints/step-00000001").is_dir());
    // In a folder of its own it begins there.
    place.ok(&with(&["--steps", "1", "-q", "--init-adapter", "first", "-o", "second"]));

    let full = ["train", "-d", "data", "--fine-tune-type", "full", "--steps", "1", "-q"];
    place.ok(&[&full[..], &["-m", "base", "-o", "whole"]].concat());
    let checkpoint = "whole/checkpoints/step-00000001";
    let more = ["-m", checkpoint, "-o", "whole", "--overwrite"];
    let stderr = place.fails(2, &[&full[..], &more].concat());
    assert!(stderr.contains("model: ") && stderr.contains("choose another"), "{stderr}");
    assert!(place.path(checkpoint).join("tokenizer.json").is_file());
}

#[test]
fn a_checkpoint_that_was_copied_goes_on_where_it_is_told_to() {
    let place = Place::with_model();
    let steps = ["--steps", "2", "--save-every", "1"];
    place.ok(&with(&[&steps[..], &["-q", "-o", "old"]].concat()));
    // Into the folder of another run, which is none of its own.
    place.ok(&with(&["--steps", "3", "-q", "-o", "other"]));
    std::fs::create_dir(place.path("other/backup")).unwrap();
    let checkpoint = "other/backup/step-00000001";
    let mut copy = Command::new("cp");
    copy.arg("-r").arg(place.path("old/checkpoints/step-00000001")).arg(place.path(checkpoint));
    assert!(copy.status().unwrap().success());
    let before = place.read("other/metrics.jsonl");
    for (more, expected) in
        [(&[][..], "so it isn't known where"), (&["-o", "other"], "holds a run already")]
    {
        let resume = [&steps[..], &["--resume", checkpoint], more].concat();
        let stderr = place.fails(2, &with(&resume));
        assert!(stderr.contains(expected) && stderr.contains("--output"), "{stderr}");
    }
    assert_eq!(place.read("other/metrics.jsonl"), before);
    assert!(place.path("other/checkpoints/step-00000003").is_dir());
    let resume = [&steps[..], &["--resume", checkpoint, "-o", "new"]].concat();
    let output = place.run(&with(&resume));
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("Going on after step 1 of 2"), "{stderr}");
    // In its run's folder it goes on there.
    place.ok(&["train", "--resume", "old/checkpoints/step-00000001", "-q"]);
    let result =
        |run: &str| std::fs::read(place.path(run).join("adapter_model.safetensors")).unwrap();
    assert!(result("new") == result("old"));
}

#[test]
fn a_start_that_fails_leaves_no_folder_and_touches_no_file() {
    let place = Place::with_model();
    place.fails(1, &["train", "-m", "base", "-d", "nothing", "-o", "new/run"]);
    assert!(!place.path("new").exists());
    place.write("kept/.write-test", "mine");
    place.fails(1, &["train", "-m", "base", "-d", "nothing", "-o", "kept"]);
    assert_eq!(place.read("kept/.write-test"), "mine");
    assert_eq!(std::fs::read_dir(place.path("kept")).unwrap().count(), 1);
    place.ok(&with(&["--steps", "1", "-q", "-o", "kept"]));
    assert_eq!(place.read("kept/.write-test"), "mine");
}

/// A program that does not outlive its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn in_a_terminal_ctrl_c_stops_an_answer_and_the_conversation_goes_on() {
    let place = Place::with_model();
    let (ours, theirs) = terminal(0);
    let mut command = place.command(&[
        "chat",
        "-m",
        "base",
        "--ignore-eos",
        "--temperature",
        "0",
        "-n",
        "16000000",
        "--threads",
        "1",
    ]);
    let stdio = || Stdio::from(theirs.try_clone().unwrap());
    command.env("TERM", "xterm").stdin(stdio()).stdout(stdio()).stderr(stdio());
    let of_child = theirs.as_raw_fd();
    // SAFETY: these calls may be made between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            // Ctrl-C goes to the processes of the session that has this terminal.
            if libc::setsid() < 0 || libc::ioctl(of_child, libc::TIOCSCTTY as _, 0) < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let mut child = Running(command.spawn().unwrap());
    drop(command);
    drop(theirs);
    let mut keys = File::from(ours);
    let mut screen = keys.try_clone().unwrap();
    let shown = Arc::new(Mutex::new(Vec::new()));
    let reader = std::thread::spawn({
        let shown = Arc::clone(&shown);
        move || {
            let mut bytes = [0; 4096];
            // A terminal whose other end is closed gives an error.
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                shown.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        }
    });
    let shown = || String::from_utf8_lossy(&shown.lock().unwrap()).into_owned();
    // What the editor tells a terminal before each of its prompts.
    let prompts = || shown().matches("\u{1b}[?2004h").count();
    wait("there is no prompt", || prompts() > 0);
    for turn in 0..2 {
        keys.write_all(b"Hello\r").unwrap();
        let before = shown().len();
        wait("there is no answer", || shown().len() > before + 200);
        let before = prompts();
        keys.write_all(b"\x03").unwrap();
        wait(&format!("the answer of turn {turn} goes on"), || {
            assert_eq!(child.0.try_wait().unwrap(), None, "{}", shown());
            prompts() > before
        });
        // What was said may be more than this small model can read.
        let before = prompts();
        keys.write_all(b"/reset\r").unwrap();
        wait("there is no prompt", || prompts() > before);
    }
    keys.write_all(b"/exit\r").unwrap();
    wait("the conversation goes on", || child.0.try_wait().unwrap().is_some());
    assert_eq!(child.0.wait().unwrap().code(), Some(0), "{}", shown());
    drop(keys);
    reader.join().unwrap();
}

#[test]
fn a_run_from_evas_start_says_what_it_found_and_resumes_without_looking_again() {
    let place = Place::with_model();
    let eva = ["--init-lora-weights", "eva", "--eva-rho", "3"];
    let planned = place.ok(&with(&[&eva[..], &["--steps", "4", "--dry-run"]].concat()));
    assert!(planned.contains("starts as eva"), "{planned}");

    let run = |output: &str, steps: &str, more: &[&str]| {
        let steps = ["--steps", steps, "-o", output, "--save-every", "2", "--schedule", "constant"];
        let output = place.run(&with(&[&eva[..], &steps, more].concat()));
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    let stderr = run("whole", "4", &[]);
    assert!(stderr.contains("reading data for EVA's start"), "{stderr}");
    assert!(stderr.contains("EVA: read ") && stderr.contains("ranks are 1 to "), "{stderr}");
    run("parts", "2", &[]);
    let stderr = run("parts", "4", &["--resume"]);
    assert!(stderr.contains("Going on after step 2") && !stderr.contains("EVA:"), "{stderr}");
    let result =
        |run: &str| std::fs::read(place.path(&format!("{run}/adapter_model.safetensors"))).unwrap();
    assert!(result("whole") == result("parts"));
    let config = place.read("parts/adapter_config.json");
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    assert!(!config["rank_pattern"].as_object().unwrap().is_empty(), "{config}");
    assert_eq!(config["eva_config"]["rho"], 3.0);
    assert!(place.read("parts/train_config.yaml").contains("eva_rho: 3.0"));

    // What the ranks were found with is part of the run.
    let resume = ["--steps", "4", "-o", "parts", "--schedule", "constant", "--save-every", "2"];
    let other = ["--init-lora-weights", "eva", "--eva-rho", "2", "--resume"];
    let stderr = place.fails(1, &with(&[&resume[..], &other].concat()));
    assert!(stderr.contains("adapter.eva.rho was 3.0 and is now 2.0"), "{stderr}");
}
