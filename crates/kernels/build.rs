//! Compiles every operation's `kernel.cu` into one file of machine code, with the feature `cuda`.
//!
//! `NVCC` names the compiler; else it is that of `CUDA_HOME` or `CUDA_PATH`, on the `PATH`, or in
//! `/usr/local/cuda`. `METAL_CANDLE_CUDA_ARCHITECTURES` names what to compile for, by default
//! `80,90a`: machine code for Ampere and its kin and for Hopper. Newer GPUs get PTX beside it. With `none` nothing is
//! compiled, for checks of the Rust code for all of them: a program so built has no kernels.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs, io, thread};

const ARCHITECTURES: &str = "METAL_CANDLE_CUDA_ARCHITECTURES";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(hopper)");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH", ARCHITECTURES] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if let Err(error) = compile_all() {
        println!("cargo::error={error}");
    }
}

fn compile_all() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let compiler = compiler();
    let targets = targets();
    // Some kernels are only for Hopper's own instruction set.
    if targets.is_empty() || targets.iter().any(|target| target.ends_with("code=sm_90a")) {
        println!("cargo::rustc-cfg=hopper");
    }
    let kernels = kernels(Path::new("src")).map_err(|error| format!("src: {error}"))?;
    let shared = Path::new("src/backend/cuda");
    println!("cargo::rerun-if-changed={}", shared.display());
    // A new operation, whose kernel nothing else names, is a line there.
    println!("cargo::rerun-if-changed=src/lib.rs");
    for kernel in &kernels {
        println!("cargo::rerun-if-changed={}", kernel.display());
        for header in headers(kernel).map_err(|error| format!("{}: {error}", kernel.display()))? {
            println!("cargo::rerun-if-changed={}", header.display());
        }
    }
    let mut names: Vec<_> =
        kernels.iter().filter_map(|kernel| kernel.parent()?.file_name()).collect();
    names.sort();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("two folders with a kernel.cu are named {}", pair[0].display()));
    }
    let waiting = Mutex::new(kernels.into_iter());
    let next = || waiting.lock().ok()?.next();
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let work = || {
            while let Some(kernel) = next() {
                compile(&compiler, &targets, shared, &kernel, &out)?;
            }
            Ok(())
        };
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        handles.into_iter().try_for_each(|handle| {
            handle.join().unwrap_or_else(|_| Err("a thread that ran nvcc panicked".into()))
        })
    })
}

fn compile(
    compiler: &OsString,
    targets: &[String],
    include: &Path,
    kernel: &Path,
    out: &Path,
) -> Result<(), String> {
    let name = kernel.parent().and_then(Path::file_name).ok_or("a kernel has no folder")?;
    let output = out.join(name).with_extension("fatbin");
    if targets.is_empty() {
        return fs::write(&output, []).map_err(|error| format!("{}: {error}", output.display()));
    }
    let result = Command::new(compiler)
        .args(["--fatbin", "-std=c++17", "-O3", "--expt-relaxed-constexpr"])
        .args(targets)
        .arg("-I")
        .arg(include)
        .arg("-o")
        .arg(&output)
        .arg(kernel)
        .output()
        .map_err(|error| {
            format!(
                "cannot start {}: {error}; the feature `cuda` needs NVIDIA's compiler: set NVCC or CUDA_HOME",
                compiler.display()
            )
        })?;
    if result.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&result.stderr);
    Err(format!("{} {}: {}", compiler.display(), kernel.display(), text.replace('\n', " | ")))
}

/// Every `kernel.cu` in a folder of the sources.
fn kernels(source: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(source)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(kernels(&path)?);
        } else if path.file_name().is_some_and(|name| name == "kernel.cu") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The headers beside a kernel.
fn headers(kernel: &Path) -> io::Result<Vec<PathBuf>> {
    let folder = kernel.parent().unwrap_or(Path::new("."));
    let paths: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    let is_header = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "cuh");
    Ok(paths.into_iter().filter(is_header).collect())
}

fn compiler() -> OsString {
    if let Some(named) = env::var_os("NVCC") {
        return named;
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let on_path = env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|folder| folder.join("nvcc").is_file()));
    let usual = (!on_path).then(|| PathBuf::from("/usr/local/cuda"));
    homes
        .chain(usual)
        .map(|home| home.join("bin/nvcc"))
        .find(|path| path.is_file())
        .map_or_else(|| "nvcc".into(), PathBuf::into_os_string)
}

/// The options of nvcc for the architectures, of which there may be none.
fn targets() -> Vec<String> {
    let named = env::var(ARCHITECTURES).unwrap_or_else(|_| "80,90a".into());
    if named == "none" {
        return Vec::new();
    }
    let mut targets: Vec<String> = named
        .split(',')
        .map(|name| format!("-gencode=arch=compute_{name},code=sm_{name}"))
        .collect();
    if env::var_os(ARCHITECTURES).is_none() {
        targets.push("-gencode=arch=compute_90,code=compute_90".into());
    }
    targets
}
