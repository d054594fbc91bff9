//! What can go wrong, and what is found in kernels.

use crate::Mode;
use std::fmt;
use std::path::PathBuf;

/// Why a kernel was not compiled, or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no compiler that can do it.
    #[error("{0}")]
    NoCompiler(String),
    /// A file or a program.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// How it failed.
        source: std::io::Error,
    },
    /// The text is not what Metal would compile, or more than the emulator understands.
    #[error("{}{message}", place.as_ref().map_or(String::new(), |place| format!("{place}: ")))]
    Source {
        /// File and line, where known.
        place: Option<String>,
        /// What is wrong.
        message: String,
    },
    /// The compiler refused the text.
    #[error("{path} does not compile (mode {mode}):\n{message}", path = path.display())]
    Compile {
        /// The file.
        path: PathBuf,
        /// How it was compiled.
        mode: Mode,
        /// What the compiler said.
        message: String,
    },
    /// Something that a test asked for and that there isn't.
    #[error("{0}")]
    Usage(String),
    /// What a run found.
    #[error(transparent)]
    Finding(#[from] Finding),
}

impl Error {
    /// The finding, if this is one.
    pub fn finding(&self) -> Option<&Finding> {
        match self {
            Self::Finding(finding) => Some(finding),
            _ => None,
        }
    }
}

/// What was found when a kernel ran.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The kernel's name for the host.
    pub kernel: String,
    /// How it was run.
    pub mode: Mode,
    /// The seed of the order of its threads.
    pub seed: u64,
    /// The kind of fault.
    pub kind: Fault,
    /// What was found, with the places in the source.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, mode, seed, kind, message } = self;
        write!(f, "kernel `{kernel}` (mode {mode}, seed {seed}): {kind}: {message}")
    }
}

impl std::error::Error for Finding {}

/// A kind of fault in a kernel, or in how it was dispatched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A missing or wrong argument, size or function constant.
    Misuse,
    /// Two threads touch the same memory, one of them writes, and nothing orders the two.
    Race,
    /// A read or write outside of a buffer or of threadgroup memory.
    OutOfBounds,
    /// A read of threadgroup memory or of an output that nothing was written to.
    Uninitialised,
    /// Threads of a threadgroup wait at different barriers, or lanes at different operations.
    Divergence,
    /// A lane reads what a lane has that is not there or does not take part.
    InactiveLane,
    /// What the language leaves undefined: a misaligned access, an overflow, a division by zero.
    Undefined,
    /// A wild access.
    Crash,
    /// The kernel did not end.
    Hang,
}

impl Fault {
    const ALL: [(Self, &str); 9] = [
        (Self::Misuse, "misuse"),
        (Self::Race, "race"),
        (Self::OutOfBounds, "out-of-bounds"),
        (Self::Uninitialised, "uninitialised"),
        (Self::Divergence, "divergence"),
        (Self::InactiveLane, "inactive-lane"),
        (Self::Undefined, "undefined"),
        (Self::Crash, "crash"),
        (Self::Hang, "hang"),
    ];

    /// The fault that the runtime knows by this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, other)| *other == name).map(|(fault, _)| *fault)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(fault, _)| fault == self).map_or("", |(_, name)| name);
        f.write_str(&name.replace('-', " "))
    }
}
