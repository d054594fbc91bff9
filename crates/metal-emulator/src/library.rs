//! A file of kernels, and what it compiles to.

use crate::compiler::Compiler;
use crate::dispatch::Worker;
use crate::{Error, Kernel, Mode, translate};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// A `.metal` file, and how it is preprocessed.
#[derive(Clone, Debug)]
pub struct Source {
    path: PathBuf,
    /// What the file holds if it isn't there.
    text: Option<String>,
    includes: Vec<PathBuf>,
    defines: Vec<(String, String)>,
}

impl Source {
    /// The file at this path.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), text: None, includes: Vec::new(), defines: Vec::new() }
    }

    /// A file of this name that holds this text, and that the emulator keeps with what it compiles.
    pub fn text(name: &str, text: impl Into<String>) -> Self {
        Self { text: Some(text.into()), ..Self::file(name) }
    }

    /// Looks for included files in this folder too.
    pub fn include(mut self, folder: impl Into<PathBuf>) -> Self {
        self.includes.push(folder.into());
        self
    }

    /// Defines a macro.
    pub fn define(mut self, name: &str, value: &str) -> Self {
        self.defines.push((name.into(), value.into()));
        self
    }

    /// Compiles the file, or takes what was compiled earlier from the same text in the same way.
    ///
    /// # Errors
    /// There is no compiler; the file can't be read; Metal wouldn't compile it, or the emulator
    /// doesn't understand it. The message names the line.
    pub fn compile(&self, mode: Mode) -> Result<Library, Error> {
        let compiler = Compiler::get()?;
        let path = match &self.text {
            Some(text) => compiler.keep(&self.path, text)?,
            None => self.path.clone(),
        };
        let text = compiler.preprocess(&path, &self.includes, &self.defines, mode)?;
        let translation = translate::translate(&text).map_err(|wrong| Error::Source {
            place: wrong.place.map(|place| place.to_string()),
            message: wrong.message,
        })?;
        let program = compiler.link(&translation.code, mode).map_err(|message| Error::Compile {
            path: path.clone(),
            mode,
            message,
        })?;
        Ok(Library { path, mode, program, kernels: translation.kernels, workers: Mutex::default() })
    }
}

/// The kernels of a file, compiled.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    mode: Mode,
    program: PathBuf,
    kernels: Vec<String>,
    /// One process for each set of function constants.
    workers: Mutex<HashMap<Vec<String>, Arc<Mutex<Worker>>>>,
}

impl Library {
    /// How it was compiled.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The names of its kernels.
    pub fn kernels(&self) -> &[String] {
        &self.kernels
    }

    /// The kernel with this name: its `host_name`, or else its function's name.
    ///
    /// # Errors
    /// There is no such kernel.
    pub fn kernel(&self, name: &str) -> Result<Kernel<'_>, Error> {
        if !self.kernels.iter().any(|kernel| kernel == name) {
            let (path, there) = (self.path.display(), self.kernels.join(", "));
            return Err(Error::Usage(format!("{path} has no kernel `{name}`, but {there}")));
        }
        Ok(Kernel::new(self, name))
    }

    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// The process that runs kernels with these constants.
    pub(crate) fn worker(&self, constants: &[String]) -> Arc<Mutex<Worker>> {
        let mut workers = self.workers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Arc::clone(workers.entry(constants.to_vec()).or_default())
    }
}
