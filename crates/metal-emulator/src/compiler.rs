//! The compiler: which one, its options for each mode, and the programs it has made already.

use crate::{Error, Mode};
use std::collections::HashMap;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::{env, fs, io};

/// The oldest clang with arithmetic on both 16-bit types.
const OLDEST: u32 = 19;
const NEWEST: u32 = 22;
const INSTALL: &str = "apt-get install clang-22 libclang-rt-22-dev";
const AT_ONCE: usize = 2;

const SHIM: &[(&str, &str)] = &[
    ("atomics.h", include_str!("../shim/atomics.h")),
    ("kernel.h", include_str!("../shim/kernel.h")),
    ("maths.h", include_str!("../shim/maths.h")),
    ("memory.cpp", include_str!("../shim/memory.cpp")),
    ("memory.h", include_str!("../shim/memory.h")),
    ("runtime.cpp", include_str!("../shim/runtime.cpp")),
    ("runtime.h", include_str!("../shim/runtime.h")),
    ("simdgroup.h", include_str!("../shim/simdgroup.h")),
    ("types.h", include_str!("../shim/types.h")),
];

/// Metal's own headers. What is in them comes with the translation, so here they are empty.
const HEADERS: &[&str] = &[
    "metal_atomic",
    "metal_common",
    "metal_compute",
    "metal_geometric",
    "metal_integer",
    "metal_limits",
    "metal_math",
    "metal_matrix",
    "metal_numeric",
    "metal_relational",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_stdlib",
    "metal_type_traits",
    "metal_types",
];

const COMMON: &[&str] = &[
    "-O1",
    "-fno-pie",
    "-g1",
    "-gdwarf-4",
    "-fno-strict-aliasing",
    "-fno-threadsafe-statics",
    "-ffp-contract=off",
    "-Wno-everything",
];
const KERNEL: &[&str] = &[
    "-std=gnu++14",
    "-ftrivial-auto-var-init=pattern",
    // Every operation on the 16-bit types is rounded, as on the GPU.
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
];

/// How `mode` compiles kernels.
fn kernel_options(mode: Mode) -> &'static [&'static str] {
    match mode {
        Mode::Plain => &[],
        Mode::Asan => &[
            "-fno-omit-frame-pointer",
            "-fsanitize=address,alignment,bool,bounds,integer-divide-by-zero,null,return,\
             signed-integer-overflow,unreachable",
            "-fno-sanitize-recover=all",
        ],
        Mode::Race => &["-fsanitize=thread", "-mllvm", "-tsan-instrument-read-before-write=1"],
    }
}

/// How `mode` compiles the runtime, and links. The race check has the runtime's own functions where
/// ThreadSanitizer would have its library.
fn runtime_options(mode: Mode) -> &'static [&'static str] {
    match mode {
        Mode::Plain => &[],
        Mode::Asan => &["-DMSL_ASAN", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"],
        Mode::Race => &["-DMSL_RACE"],
    }
}

pub(crate) struct Compiler {
    program: String,
    version: String,
    folder: PathBuf,
    /// The folder with the shim and with Metal's headers.
    shim: PathBuf,
    /// One lock a program, so that two tests don't compile the same.
    programs: Mutex<HashMap<u64, Arc<Mutex<()>>>>,
    running: Mutex<usize>,
    finished: Condvar,
}

impl Compiler {
    /// The one of this process.
    pub fn get() -> Result<&'static Self, Error> {
        static COMPILER: LazyLock<Result<Compiler, String>> =
            LazyLock::new(|| Compiler::find().map_err(|error| error.to_string()));
        COMPILER.as_ref().map_err(|error| Error::NoCompiler(error.clone()))
    }

    fn find() -> Result<Self, Error> {
        if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
            let message = "kernels are run on x86-64 Linux only";
            return Err(Error::NoCompiler(message.into()));
        }
        let mut seen = Vec::new();
        let numbered = (OLDEST..=NEWEST).rev().map(|version| format!("clang++-{version}"));
        for program in numbered.chain(["clang++".into()]) {
            let Ok(output) = Command::new(&program).arg("--version").output() else { continue };
            let version = String::from_utf8_lossy(&output.stdout).into_owned();
            match clang_version(&version) {
                Some(number) if number >= OLDEST => return Self::new(program, version),
                _ => seen.push(program),
            }
        }
        let seen = match &seen[..] {
            [] => String::new(),
            older => format!(" ({} is older)", older.join(", ")),
        };
        Err(Error::NoCompiler(format!("there is no clang from {OLDEST} on{seen}: {INSTALL}")))
    }

    fn new(program: String, version: String) -> Result<Self, Error> {
        let folder = cache_folder();
        let shim = folder.join(format!("shim-{:016x}", hash(&SHIM)));
        for (name, text) in SHIM.iter().copied().chain(HEADERS.iter().map(|name| (*name, ""))) {
            write_new(&shim.join(name), text)?;
        }
        let new = Self {
            program,
            version,
            folder,
            shim,
            programs: Mutex::default(),
            running: Mutex::new(0),
            finished: Condvar::new(),
        };
        // The runtimes come first: without the sanitizers' libraries there is nothing to run.
        for mode in Mode::ALL {
            new.link("int main_of_probe;", mode).map_err(|message| {
                let program = &new.program;
                Error::NoCompiler(format!("{program} is not complete: {INSTALL}\n{message}"))
            })?;
        }
        Ok(new)
    }

    /// The path of a file with this text, written if it isn't there yet.
    pub fn keep(&self, name: &Path, text: &str) -> Result<PathBuf, Error> {
        let path = self.folder.join(format!("source-{:016x}", hash(&text))).join(name);
        write_new(&path, text)?;
        Ok(path)
    }

    /// The text behind the preprocessor.
    pub fn preprocess(
        &self,
        path: &Path,
        includes: &[PathBuf],
        defines: &[(String, String)],
        mode: Mode,
    ) -> Result<String, Error> {
        let mut command = self.command();
        command.args(["-E", "-xc++", "-std=gnu++14", "-undef"]);
        for define in ["__METAL__=1", "__METAL_VERSION__=310", "__METAL_MACOS__=1"] {
            command.arg(format!("-D{define}"));
        }
        command.arg("-D__HAVE_BFLOAT__=1");
        command.args(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        command.arg("-nostdinc").arg("-I").arg(&self.shim);
        for include in includes {
            command.arg("-I").arg(include);
        }
        run(command.arg(path)).map_err(|message| Error::Compile {
            path: path.into(),
            mode,
            message,
        })
    }

    /// The program of a translated text, made now or earlier.
    pub fn link(&self, code: &str, mode: Mode) -> Result<PathBuf, String> {
        let options = [COMMON, KERNEL, kernel_options(mode), runtime_options(mode)].concat();
        let key = hash(&(SHIM, HEADERS, code, options, &self.version));
        let lock = {
            let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(programs.entry(key).or_default())
        };
        let _alone = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let program = self.folder.join(format!("{key:016x}"));
        if program.exists() {
            return Ok(program);
        }
        let _turn = self.take_turn();
        let runtime = ["memory", "runtime"]
            .map(|name| self.runtime_object(name, mode))
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        // Names of this process only, until all is there.
        let mine =
            |suffix: &str| self.folder.join(format!("{key:016x}-{}.{suffix}", std::process::id()));
        let (source, object, linked) = (mine("cpp"), mine("o"), mine("linked"));
        fs::write(&source, code).map_err(|error| format!("{}: {error}", source.display()))?;
        let compiled = run(self
            .command()
            .args(COMMON)
            .args(KERNEL)
            .args(kernel_options(mode))
            .arg("-I")
            .arg(&self.shim)
            .arg("-c")
            .arg(&source)
            .arg("-o")
            .arg(&object));
        let result = compiled.and_then(|_| {
            let mut command = self.command();
            command.args(COMMON).args(runtime_options(mode)).arg("-no-pie");
            run(command.arg(&object).args(runtime).arg("-o").arg(&linked))
        });
        // Nobody misses these; a failure is told by what was to come of them.
        let _ = fs::remove_file(&source);
        let _ = fs::remove_file(&object);
        result?;
        fs::rename(&linked, &program).map_err(|error| error.to_string())?;
        Ok(program)
    }

    fn runtime_object(&self, name: &str, mode: Mode) -> Result<PathBuf, String> {
        let options = [COMMON, runtime_options(mode)].concat();
        let key = hash(&(SHIM, name, options, &self.version));
        let object = self.folder.join(format!("{name}-{key:016x}.o"));
        if !object.exists() {
            let mine = object.with_extension(unique("o"));
            run(self
                .command()
                .args(COMMON)
                .args(["-std=gnu++17"])
                .args(runtime_options(mode))
                .arg("-c")
                .arg(self.shim.join(name).with_extension("cpp"))
                .arg("-o")
                .arg(&mine))?;
            fs::rename(&mine, &object).map_err(|error| error.to_string())?;
        }
        Ok(object)
    }

    fn command(&self) -> Command {
        Command::new(&self.program)
    }

    /// Waits until fewer than [`AT_ONCE`] compilations run.
    fn take_turn(&self) -> impl Drop {
        struct Turn<'a>(&'a Compiler);
        impl Drop for Turn<'_> {
            fn drop(&mut self) {
                *self.0.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
                self.0.finished.notify_one();
            }
        }
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = self
            .finished
            .wait_while(running, |running| *running >= AT_ONCE)
            .unwrap_or_else(PoisonError::into_inner);
        *running += 1;
        Turn(self)
    }

    /// Replaces the addresses `@c0ffee@` in a message by places in the source.
    pub fn locate(&self, program: &Path, message: &str) -> String {
        let mut parts = message.split('@');
        let mut result: String = parts.next().unwrap_or_default().into();
        let mut rest: Vec<&str> = parts.collect();
        while rest.len() >= 2 {
            let address = u64::from_str_radix(rest[0], 16).ok();
            match address.and_then(|address| self.place_of(program, address)) {
                Some(place) => result += &place,
                None => result += rest[0],
            }
            result += rest[1];
            rest.drain(..2);
        }
        rest.iter().for_each(|part| result += part);
        result
    }

    /// The innermost line of the kernel's source at a return address.
    fn place_of(&self, program: &Path, address: u64) -> Option<String> {
        let mut command = Command::new("addr2line");
        command.arg("-i").arg("-e").arg(program).arg(format!("{:#x}", address.checked_sub(1)?));
        let lines = run(&mut command).ok()?;
        let shim = self.shim.to_string_lossy();
        let place =
            lines.lines().find(|line| !line.starts_with(&*shim)).or(lines.lines().next())?;
        Some(place.split(" (").next().unwrap_or(place).to_string())
    }
}

/// The major version, if this is clang of LLVM's numbers.
fn clang_version(version: &str) -> Option<u32> {
    if version.contains("Apple") {
        return None;
    }
    let number = version.split("clang version ").nth(1)?;
    number.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Beside what cargo builds: the folder above the test's own, as in `target/release/deps`.
fn cache_folder() -> PathBuf {
    let test = env::current_exe().ok();
    let built = test.as_deref().and_then(|test| {
        test.ancestors().find(|folder| folder.ends_with("deps")).and_then(Path::parent)
    });
    built.map_or_else(env::temp_dir, Path::to_path_buf).join("metal-emulator")
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn unique(extension: &str) -> OsString {
    let thread = std::thread::current().id();
    format!("{}-{thread:?}.{extension}", std::process::id()).into()
}

fn write_new(path: &Path, text: &str) -> Result<(), Error> {
    let write = || -> io::Result<()> {
        if path.exists() {
            return Ok(());
        }
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mine = path.with_extension(unique("new"));
        fs::write(&mine, text)?;
        fs::rename(mine, path)
    };
    write().map_err(|source| Error::Io { what: format!("writing {}", path.display()), source })
}

/// The standard output of a command that has to end well; else what it said.
fn run(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let Output { status, stdout, stderr } =
        command.output().map_err(|error| format!("{name}: {error}"))?;
    if !status.success() {
        return Err(String::from_utf8_lossy(&stderr).into_owned());
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}
