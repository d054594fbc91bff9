//! Compiles every operation's `kernel.cu` into one file of machine code, with the feature `cuda`.
//!
//! `NVCC` names the compiler; else it is that of `CUDA_HOME` or `CUDA_PATH`, on the `PATH`, or in
//! `/usr/local/cuda`. `METAL_CANDLE_CUDA_ARCHITECTURES` names what to compile for, by default
//! `80,90a`: machine code for Ampere and its kin and for Hopper. Newer GPUs get PTX beside it. With `none` nothing is
//! compiled, for checks of the Rust code for all of them: a program so built has no kernels. What was compiled before from the
//! same sources, in the same way, isn't compiled again.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
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
    let targets = targets();
    let compiler = Compiler::new(&targets);
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
                compiler.compile(&kernel, shared, &out)?;
            }
            Ok(())
        };
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        handles.into_iter().try_for_each(|handle| {
            handle.join().unwrap_or_else(|_| Err("a thread that ran nvcc panicked".into()))
        })
    })
}

/// nvcc with the options for all kernels.
struct Compiler {
    program: OsString,
    options: Vec<String>,
    /// Whether there is nothing to compile for.
    is_idle: bool,
    /// What results depend on beside sources.
    identity: String,
}

impl Compiler {
    fn new(targets: &[String]) -> Self {
        let program = compiler();
        let mut options: Vec<String> =
            ["--fatbin", "-std=c++17", "-O3", "--expt-relaxed-constexpr"]
                .into_iter()
                .map(String::from)
                .collect();
        options.extend_from_slice(targets);
        // Without an answer, nvcc says later what is wrong.
        let version = Command::new(&program).arg("--version").output().ok();
        let version = version.map(|said| String::from_utf8_lossy(&said.stdout).into_owned());
        let flags = ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"].map(env::var_os);
        let identity = format!("{program:?} {options:?} {flags:?} {version:?}");
        Self { program, options, is_idle: targets.is_empty(), identity }
    }

    fn compile(&self, kernel: &Path, shared: &Path, out: &Path) -> Result<(), String> {
        let name = kernel.parent().and_then(Path::file_name).ok_or("a kernel has no folder")?;
        let output = out.join(name).with_extension("fatbin");
        let stamp = output.with_extension("stamp");
        let written = |path: &Path, text: &str| {
            fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
        };
        let mut sources = BTreeMap::new();
        read_sources(kernel, shared, &mut sources)
            .map_err(|error| format!("{}: {error}", kernel.display()))?;
        let mut hasher = DefaultHasher::new();
        sources.hash(&mut hasher);
        let known = format!("{:016x} {}", hasher.finish(), self.identity);
        if output.is_file() && fs::read_to_string(&stamp).is_ok_and(|stamp| stamp == known) {
            return Ok(());
        }
        // A result that is half written has no stamp.
        let _ = fs::remove_file(&stamp);
        if self.is_idle {
            written(&output, "")?;
            return written(&stamp, &known);
        }
        let result = Command::new(&self.program)
            .args(&self.options)
            .arg("-I")
            .arg(shared)
            .arg("-o")
            .arg(&output)
            .arg(kernel)
            .output()
            .map_err(|error| {
                format!(
                    "cannot start {}: {error}; the feature `cuda` needs NVIDIA's compiler: set NVCC or CUDA_HOME",
                    self.program.display()
                )
            })?;
        if result.status.success() {
            return written(&stamp, &known);
        }
        let text = String::from_utf8_lossy(&result.stderr).replace('\n', " | ");
        Err(format!("{} {}: {text}", self.program.display(), kernel.display()))
    }
}

/// A file, and what of this crate it includes, however that is conditioned.
fn read_sources(
    file: &Path,
    shared: &Path,
    sources: &mut BTreeMap<PathBuf, String>,
) -> io::Result<()> {
    let file = file.canonicalize()?;
    if sources.contains_key(&file) {
        return Ok(());
    }
    let text = fs::read_to_string(&file)?;
    sources.insert(file.clone(), text.clone());
    let beside = file.parent().unwrap_or(Path::new("."));
    for line in text.lines() {
        let name = line.trim().strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
        let places = name.into_iter().flat_map(|name| [beside.join(name), shared.join(name)]);
        // What is nowhere, nvcc tells.
        if let Some(place) = places.into_iter().find(|place| place.is_file()) {
            read_sources(&place, shared, sources)?;
        }
    }
    Ok(())
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
