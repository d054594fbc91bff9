//! Timing this machine: that it runs and says what it should, never how fast.

use crate::common::Place;

#[test]
fn every_part_is_timed_and_reported() {
    let place = Place::new();
    let parts = ["bench", "--shape", "tiny", "--seq", "16", "--tokens", "4", "--rank", "2"];
    let few = ["--steps", "2", "--batch", "2", "--gradient-checkpointing", "-q"];
    let only = ["--only", "train,prefill,decode,serve", "--dtype", "f32", "--json"];
    let requests = ["--requests", "3", "--adapters", "2"];
    let report = place.json(&[&parts[..], &few, &requests, &only].concat());
    let names: Vec<&str> = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "train-tiny-2x16-r2-f32-checkpointing",
            "prefill-tiny-16-f32",
            "decode-tiny-4-f32",
            "serve-tiny-3x16+4-f32-2-adapters",
        ]
    );
    for row in report["rows"].as_array().unwrap() {
        for value in ["tokens_per_second", "floor", "share_of_peak"] {
            assert!(row[value].as_f64().unwrap() > 0.0, "{row}");
        }
        assert_eq!(row["call"]["samples"], 2);
    }
    assert!(report["peaks"]["fma"].as_f64().unwrap() > 0.0);

    for (more, expected) in [
        ("--mixed-lengths", ["serve-tiny-3x16+4-f32-mixed", "first-token-tiny-16-beside-3-f32"]),
        ("--seen-prompt", ["serve-tiny-3x16+4-f32", "first-token-tiny-16-seen-beside-3-f32"]),
    ] {
        let only = ["bench", "--shape", "tiny", "--tokens", "4", "--requests", "3", "--steps", "2"];
        let json = ["--only", "serve,first-token", "--dtype", "f32", "--json", "-q"];
        let report = place.json(&[&only[..], &json, &[more]].concat());
        for (row, name) in report["rows"].as_array().unwrap().iter().zip(expected) {
            assert_eq!(row["name"], name);
            assert!(row["call"]["median"].as_f64().unwrap() > 0.0, "{row}");
        }
    }

    let only = [
        "bench",
        "--only",
        "serve",
        "--shape",
        "tiny",
        "--tokens",
        "2",
        "--prompt",
        "4",
        "--requests",
        "2",
    ];
    let on_two = ["--adapters", "2", "--target-modules", "q_proj,v_proj"];
    let report = place.json(&[&only[..], &on_two, &["--steps", "2", "--json", "-q"]].concat());
    assert_eq!(report["rows"][0]["name"], "serve-tiny-2x4+2-bf16-2-adapters-of-q_proj-v_proj");

    // The shape of a model's files.
    place.write_shape();
    let only = ["bench", "--only", "decode", "--tokens", "4", "--steps", "2", "--dtype", "f32"];
    for shape in ["shape", "shape/config.json"] {
        let report = place.json(&[&only[..], &["--json", "-q", "--shape", shape]].concat());
        assert_eq!(report["rows"][0]["name"], "decode-shape-4-f32");
    }

    let ops =
        ["bench", "--only", "ops", "--samples", "1", "-q", "--threads", "1", "--json", "ops.json"];
    let table = place.ok(&ops);
    assert!(table.contains("GFLOP/s") && table.contains("of peak"), "{table}");
    assert!(!table.contains("Models"), "{table}");
    let report: serde_json::Value = serde_json::from_str(&place.read("ops.json")).unwrap();
    assert_eq!(report["peaks"]["threads"], 1);
    for row in report["rows"].as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        assert!(table.contains(name), "{name}");
        assert_eq!(row["queue"].is_object(), !name.starts_with("adamw"), "{name}");
    }
}

#[test]
fn floors_of_apples_chips_are_printed_without_timing() {
    let table = Place::new().ok(&["bench", "--floors"]);
    assert!(table.contains("| M1: 68.25 GB/s | 15.9 |"), "{table}");
}

#[test]
fn what_cannot_be_timed_is_wrong_usage() {
    let place = Place::new();
    for (flags, expected) in [
        (&["--shape", "gpt-5"][..], "shape: is gpt-5"),
        (&["--shape", "."], "no config.json here"),
        (&["--seq", "0"], "seq: is 0"),
        (&["--rank", "0"], "rank: is 0"),
        (&["--samples", "0"], "samples: is 0"),
        (&["--dtype", "f16"], "expected f32 or bf16"),
        (&["--only", "chat"], "invalid value 'chat'"),
        (&["--threads", "0"], "threads: is 0"),
        #[cfg(not(feature = "cuda"))]
        (&["--device", "cuda"], "no CUDA"),
        (&["--floors", "--json"], "cannot be used with"),
        (&["--only", "decode", "--adapters", "3"], "--adapters: is for serve, which --only leaves"),
        (&["--target-modules", "q_proj"], "--adapters <N>"),
        (&["--adapters", "2", "--target-modules", "lm_head"], "invalid value 'lm_head'"),
        (&["--only", "ops", "--mixed-lengths"], "--mixed-lengths: is for serve"),
        (&["--only", "ops", "--quantize", "nf4"], "--quantize: is for train, prefill"),
        (&["--only", "ops", "--base-compute", "int8"], "--base-compute: is for train, prefill"),
        (&["--only", "ops", "--dtype", "bf16"], "--dtype: is for train, prefill"),
        (&["--only", "serve", "--samples", "9"], "--samples: is for ops"),
        (&["--only", "train", "--tokens", "9"], "--tokens: is for decode, serve"),
        (&["--device", "cpu", "--matmul", "candle"], "matmul: is only for Metal"),
    ] {
        let stderr = place.fails(2, &[&["bench"], flags].concat());
        assert!(stderr.contains(expected), "{flags:?}: {stderr}");
    }
}
