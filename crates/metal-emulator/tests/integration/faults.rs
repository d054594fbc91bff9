//! Kernels that are wrong: each fault is found in the modes that look for it, and said.

use Mode::{Asan, Plain, Race};
use metal_emulator::{Dispatch, Error, Fault, Finding, Kernel, Library, Mode, SEEDS, Source};
use std::path::Path;

fn source(file: &str) -> Source {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels");
    Source::file(folder.join(file)).include(folder.join("include"))
}

/// The finding of a run that has to have one.
fn finding<T: std::fmt::Debug>(result: Result<T, Error>) -> Finding {
    match result {
        Err(Error::Finding(finding)) => finding,
        other => panic!("not a finding: {other:?}"),
    }
}

/// Asserts what was found, and that its message has all these parts.
fn assert_found(finding: &Finding, kind: Fault, parts: &[&str]) {
    let message = finding.to_string();
    assert_eq!(finding.kind, kind, "{message}");
    for part in parts.iter().chain(&[&*finding.kernel]) {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

/// The line of a file of kernels that has this text.
fn line(file: &str, text: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels");
    let source = std::fs::read_to_string(folder.join(file)).unwrap();
    let at = source.lines().position(|line| line.contains(text)).unwrap();
    format!("{file}:{}", at + 1)
}

fn row_sum<'a>(library: &'a Library, columns: usize) -> Result<Dispatch<'a>, Error> {
    let x: Vec<f32> = (0..2 * columns).map(|i| i as f32).collect();
    Ok(library
        .kernel("row_sum_f32")?
        .dispatch()
        .buffer(0, &x)
        .output::<f32>(1, 2)
        .output::<f32>(2, 2)
        .value(3, columns as u32))
}

#[test]
#[ignore = "needs clang"]
fn missing_and_wrong_barriers_are_races_in_every_order() -> Result<(), Error> {
    let (nothing, wrong) = ("", "threadgroup_barrier(mem_flags::mem_device)");
    let write = line("row_sum.metal", "part[simdgroup] = sum");
    let read = line("row_sum.metal", "sum += part[i]");
    let write_again = line("row_sum.metal", "part[simdgroup] = most");
    for (place, instead, first, second) in [
        ("FENCE", nothing, &write, &read),
        ("FENCE", wrong, &write, &read),
        ("FENCE", "threadgroup_barrier(mem_flags::mem_none)", &write, &read),
        ("AGAIN", nothing, &read, &write_again),
        ("AGAIN", wrong, &read, &write_again),
    ] {
        let library = source("row_sum.metal").define(place, instead).compile(Race)?;
        for seed in SEEDS {
            let run = row_sum(&library, 1000)?.seed(seed).threadgroups([2, 1, 1], [96, 1, 1]);
            let found = finding(run);
            if found.kind == Fault::Uninitialised {
                // A simdgroup that is far ahead reads what the others have yet to write.
                assert_eq!((place, instead), ("FENCE", nothing), "{found}");
                assert_found(&found, found.kind, &[&read, "variable `part`", "a missing barrier"]);
            } else {
                assert_found(&found, Fault::Race, &[first, second, "variable `part`", "mode race"]);
            }
        }
        // Without a second simdgroup there is nothing to order.
        row_sum(&library, 1000)?.threadgroups([2, 1, 1], [1, 1, 1])?;
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn a_missing_barrier_gives_wrong_results_in_some_order() -> Result<(), Error> {
    let right = source("row_sum.metal").compile(Plain)?;
    let wrong = source("row_sum.metal").define("FENCE", "").compile(Plain)?;
    let sums = |library, seed| {
        let run = row_sum(library, 1000)?.seed(seed).threadgroups([2, 1, 1], [96, 1, 1])?;
        run.read::<f32>(1)
    };
    let expected = sums(&right, 0)?;
    let mut differs = false;
    for seed in SEEDS {
        differs |= sums(&wrong, seed)? != expected;
    }
    assert!(differs);
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn simdgroups_need_barriers_of_their_own() -> Result<(), Error> {
    for instead in ["", "simdgroup_barrier(mem_flags::mem_device)"] {
        let library = source("scan.metal").define("FENCE", instead).compile(Race)?;
        for seed in SEEDS {
            let run = library
                .kernel("scan")?
                .dispatch()
                .buffer(0, &[1_u32; 32])
                .output::<u32>(1, 32)
                .value(2, 32_u32)
                .seed(seed)
                .threadgroups([1, 1, 1], [32, 1, 1]);
            // Downwards, a thread reads its neighbour's element before that is written.
            let found = finding(run);
            let kind = if seed == 0 { Fault::Race } else { found.kind };
            assert!(matches!(kind, Fault::Race | Fault::Uninitialised), "{found}");
            assert_found(&found, kind, &["variable `mine`", "scan.metal:"]);
        }
    }
    let library = source("simdgroup.metal").define("UNORDERED", "1").compile(Race)?;
    let run = |library: &Library| {
        let kernel = library.kernel("stores_and_loads")?;
        let dispatch = kernel.dispatch().output::<f32>(0, 64).threadgroup_memory(0, 256);
        dispatch.threadgroups([1, 1, 1], [32, 1, 1])
    };
    let (store, load) = (
        line("simdgroup.metal", "simdgroup_store(m, shared)"),
        line("simdgroup.metal", "simdgroup_load(n, shared)"),
    );
    let found = finding(run(&library));
    assert_found(&found, found.kind, &[&load, "threadgroup(0)"]);
    if found.kind != Fault::Uninitialised {
        assert_found(&found, Fault::Race, &[&store]);
    }
    run(&source("simdgroup.metal").compile(Race)?)?;
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn a_product_without_its_barrier_is_a_race() -> Result<(), Error> {
    let library = source("matmul.metal").define("FENCE", "").compile(Race)?;
    for seed in SEEDS {
        let run = library
            .kernel("matmul_f16")?
            .constant(0, false)
            .dispatch()
            .buffer(0, &[half::f16::ONE; 32 * 32])
            .buffer(1, &[half::f16::ONE; 32 * 32])
            .output::<half::f16>(2, 32 * 32)
            .buffer(3, &[32_u32, 32, 32, 0])
            .threadgroup_memory(0, 2048)
            .seed(seed)
            .threadgroups([1, 1, 1], [128, 1, 1]);
        let found = finding(run);
        assert!(matches!(found.kind, Fault::Race | Fault::Uninitialised), "{found}");
        assert_found(&found, found.kind, &["threadgroup(0)", "matmul.metal:"]);
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn reads_past_a_row_are_found_where_they_leave_the_buffer() -> Result<(), Error> {
    for mode in [Asan, Race] {
        let library = source("row_sum.metal").define("PAST", "1").compile(mode)?;
        let found = finding(row_sum(&library, 1000)?.threadgroups([2, 1, 1], [96, 1, 1]));
        let place = line("row_sum.metal", "sum += float(x[i])");
        let parts = [&*place, "read of 4 bytes at byte 8000 of buffer(0), which has 8000 bytes"];
        assert_found(&found, Fault::OutOfBounds, &parts);
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn accesses_outside_of_memory_are_found() -> Result<(), Error> {
    for mode in [Asan, Race] {
        let library = source("faults.metal").compile(mode)?;
        let found = |name: &str, bind: fn(Dispatch<'_>) -> Dispatch<'_>, parts: &[&str]| {
            let kernel = library.kernel(name)?;
            let run = bind(kernel.dispatch()).threadgroups([1, 1, 1], [32, 1, 1]);
            let found = finding(run);
            assert_found(&found, Fault::OutOfBounds, parts);
            assert!(found.message.contains("faults.metal:"), "{found}");
            Ok::<(), Error>(())
        };
        found(
            "writes_past_buffer",
            |dispatch| dispatch.buffer(0, &[0_f32; 32]),
            &["write of 4 bytes at byte 128 of buffer(0), which has 128 bytes"],
        )?;
        found(
            "reads_before_buffer",
            |dispatch| dispatch.buffer(0, &[0_f32; 32]).output::<f32>(1, 32),
            &["read of 4 bytes at byte -4 of buffer(0)"],
        )?;
        found(
            "writes_past_argument",
            |dispatch| dispatch.output::<f32>(0, 32).threadgroup_memory(0, 64),
            &["write of 4 bytes at byte 64 of threadgroup(0), which has 64 bytes"],
        )?;
        found(
            "reads_past_variable",
            |dispatch| dispatch.output::<f32>(0, 32).value(1, 1_u32),
            &["read of 4 bytes at byte 128 of threadgroup variable `first`"],
        )?;
        found(
            "atomic_past_buffer",
            |dispatch| dispatch.buffer(0, &[0_u32; 31]),
            &["at byte 124 of buffer(0), which has 124 bytes"],
        )?;
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn what_the_language_leaves_undefined_is_found() -> Result<(), Error> {
    let library = source("faults.metal").compile(Asan)?;
    let run = |name: &str, bind: fn(Dispatch<'_>) -> Dispatch<'_>| {
        Ok::<_, Error>(finding(
            bind(library.kernel(name)?.dispatch()).threadgroups([1, 1, 1], [32, 1, 1]),
        ))
    };
    let found = run("indexes_past_array", |d| d.output::<f32>(0, 32).value(1, 1_u32))?;
    let place = line("faults.metal", "mine[(i + step) % 8]");
    assert_found(&found, Fault::OutOfBounds, &["index 4 out of bounds", &place]);
    let found = run("misaligned", |d| d.buffer(0, &[0_u8; 8]))?;
    let place = line("faults.metal", "(x + 1) = 1");
    assert_found(&found, Fault::Undefined, &["misaligned", &place]);
    let found = run("divides_by_zero", |d| d.buffer(0, &[0_i32; 32]))?;
    assert_found(&found, Fault::Undefined, &["division by zero", &line("faults.metal", "5 / x")]);
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn reads_of_an_argument_that_a_function_constant_leaves_out_are_found() -> Result<(), Error> {
    for mode in [Asan, Race] {
        let library = source("faults.metal").compile(mode)?;
        let run = |given: bool| {
            let kernel = library.kernel("reads_what_is_left_out")?.constant(7, given);
            let dispatch = kernel.dispatch().output::<f32>(0, 32);
            let dispatch = if given { dispatch.buffer(1, &[3_f32; 32]) } else { dispatch };
            dispatch.threadgroups([1, 1, 1], [32, 1, 1])
        };
        let parts = ["buffer(1), left out by a function constant", "faults.metal:"];
        assert_found(&finding(run(false)), Fault::OutOfBounds, &parts);
        assert_eq!(run(true)?.read::<f32>(0)?, [3.0; 32]);
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn reads_of_what_nobody_wrote_are_found() -> Result<(), Error> {
    let library = source("faults.metal").compile(Race)?;
    let run = |name: &str| {
        let kernel = library.kernel(name)?;
        let run = kernel.dispatch().output::<f32>(0, 32).threadgroups([1, 1, 1], [32, 1, 1]);
        Ok::<_, Error>(finding(run))
    };
    let place = line("faults.metal", "shared[i + 1]");
    let parts = ["byte 128 of threadgroup variable `shared`", &place];
    assert_found(&run("reads_what_nobody_wrote")?, Fault::Uninitialised, &parts);
    let parts = ["byte 0 of buffer(0)", &line("faults.metal", "y[i] += 1")];
    assert_found(&run("reads_its_output")?, Fault::Uninitialised, &parts);
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn threadgroups_are_not_ordered_by_a_barrier() -> Result<(), Error> {
    let library = source("faults.metal").compile(Race)?;
    for seed in SEEDS {
        let run = |groups| {
            let dispatch = library.kernel("reads_another_threadgroup")?.dispatch();
            let dispatch = dispatch.buffer(0, &[0_f32; 64]).output::<f32>(1, 64).seed(seed);
            dispatch.threadgroups([groups, 1, 1], [32, 1, 1])
        };
        let parts = ["another threadgroup", "buffer(0)", "device memory"];
        assert_found(&finding(run(2)), Fault::Race, &parts);
        run(1)?;
        let run = library.kernel("mixes_atomic_and_plain")?.dispatch().buffer(0, &[0_u32]);
        let found = finding(run.seed(seed).threadgroups([1, 1, 1], [32, 1, 1]));
        assert_found(&found, Fault::Race, &["buffer(0)"]);
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn lanes_that_are_not_there_are_found_in_every_mode() -> Result<(), Error> {
    let place = line("simdgroup.metal", "sum += simd_shuffle_down(sum, step)");
    for mode in Mode::ALL {
        let library = source("simdgroup.metal").compile(mode)?;
        for seed in SEEDS {
            let run = |name: &str, threads: u32| {
                let kernel = library.kernel(name)?;
                let dispatch = kernel.dispatch().buffer(0, &[1_f32; 64]).seed(seed);
                dispatch.threadgroups([1, 1, 1], [threads, 1, 1])
            };
            assert_eq!(run("assumes_32_lanes", 64)?.read::<f32>(0)?[32], 32.0);
            let parts = [&*place, "simd_shuffle_down", "isn't active (active: 8 lanes)"];
            assert_found(&finding(run("assumes_32_lanes", 40)), Fault::InactiveLane, &parts);
            let parts = ["the whole simdgroup must take part, but 16 of 32 lanes are active"];
            assert_found(&finding(run("multiplies", 16)), Fault::InactiveLane, &parts);
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn barriers_that_not_all_threads_reach_are_found_in_every_mode() -> Result<(), Error> {
    for mode in Mode::ALL {
        let library = source("faults.metal").compile(mode)?;
        let run = |name: &str| {
            let kernel = library.kernel(name)?;
            let dispatch = kernel.dispatch().buffer(0, &[1_f32; 32]);
            Ok::<_, Error>(finding(dispatch.threadgroups([1, 1, 1], [32, 1, 1])))
        };
        let (sum, max) = (line("faults.metal", "simd_sum(x[i])"), line("faults.metal", "simd_max"));
        assert_found(&run("diverges")?, Fault::Divergence, &[&sum, &max]);
        let parts = ["thread 3 has returned while thread"];
        assert_found(&run("returns_early")?, Fault::Divergence, &parts);
    }
    Ok(())
}

/// A product of two numbers.
fn one<'a>(kernel: &Kernel<'a>) -> Dispatch<'a> {
    let dispatch = kernel.dispatch().buffer(0, &[1_f32]).buffer(1, &[1_f32]);
    dispatch.output::<f32>(2, 1).buffer(3, &[1_u32, 1, 1, 0])
}

#[test]
#[ignore = "needs clang"]
fn wrong_arguments_are_found_in_every_mode() -> Result<(), Error> {
    let misuse = |run: Result<_, Error>, part: &str| {
        assert_found(&finding(run), Fault::Misuse, &[part]);
    };
    for mode in Mode::ALL {
        let library = source("row_sum.metal").compile(mode)?;
        let kernel = library.kernel("row_sum_f32")?;
        let bound =
            || kernel.dispatch().buffer(0, &[1_f32; 8]).output::<f32>(1, 2).output::<f32>(2, 2);
        let (groups, size) = ([1, 1, 1], [32, 1, 1]);
        misuse(bound().threadgroups(groups, size), "buffer(3) is not bound");
        let small = bound().value(3, 8_u16).threadgroups(groups, size);
        misuse(small, "buffer(3): 2 bytes are bound, the kernel's type has 4");
        let odd = bound().buffer_at(0, &[0_u8; 40], 2).value(3, 8_u32).threadgroups(groups, size);
        misuse(odd, "buffer(0): the offset 2 is not a multiple of 4");
        let behind = bound().buffer_at(0, &[0_u8; 40], 44).threadgroups(groups, size);
        misuse(behind, "buffer(0): the offset 44 is behind its 40 bytes");
        let large = bound().value(3, 8_u32).threadgroups(groups, [64, 32, 1]);
        misuse(large, "2048 threads in a threadgroup, where 1 to 1024 can be");
        let memory = bound().value(3, 8_u32).threadgroup_memory(0, 32768);
        misuse(memory.threadgroups(groups, size), "32896 bytes of threadgroup memory");
        bound().value(3, 8_u32).threadgroups(groups, size)?;

        let library = source("matmul.metal").compile(mode)?;
        let kernel = library.kernel("matmul_f32")?;
        let constant = one(&kernel).threadgroup_memory(0, 4096).threadgroups(groups, size);
        misuse(constant, "function constant 0 (`accumulate`) is not set");
        let clear = library.kernel("clear")?.dispatch().output::<f32>(0, 32);
        assert_eq!(clear.threads([32, 1, 1], [32, 1, 1])?.read::<f32>(0)?, [0.0; 32]);
        let kernel = kernel.constant(0, true);
        let wide = one(&kernel).threadgroup_memory(0, 4096).threadgroups(groups, [129, 1, 1]);
        misuse(wide, "129 threads in a threadgroup, where 1 to 128 can be");
        let length = one(&kernel).buffer(4, &[1_f32]).threadgroups(groups, [128, 1, 1]);
        misuse(length, "threadgroup(0) has no length set");
        let left_out = one(&kernel).threadgroup_memory(0, 4096).threadgroups(groups, [128, 1, 1]);
        misuse(left_out, "buffer(4) is not bound");
        let typed = one(&kernel.constant(0, 1_u32)).threadgroups(groups, [128, 1, 1]);
        misuse(typed, "function constant 0 (`accumulate`): 4 bytes are given, its type has 1");
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn what_does_not_compile_is_told_with_its_line() -> Result<(), Error> {
    let library = source("row_sum.metal").define("FENCE", "no_such_function()").compile(Plain);
    let message = library.map(|_| ()).unwrap_err().to_string();
    assert!(message.contains(&line("row_sum.metal", "  FENCE;")), "{message}");
    let message = source("no_such_file.metal").compile(Plain).map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("no_such_file.metal"), "{message}");
    let library = source("row_sum.metal").compile(Plain)?;
    let message = library.kernel("row_sum_f64").map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("has no kernel `row_sum_f64`, but row_sum_f32"), "{message}");
    Ok(())
}
