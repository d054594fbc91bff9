//! One run of a kernel: what is bound, how many threads, and what comes back.

use crate::compiler::Compiler;
use crate::element::{Constant, Element, bytes_of, elements_of};
use crate::{Error, Fault, Finding, Library};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A kernel of a library, with its function constants.
#[derive(Clone, Debug)]
pub struct Kernel<'a> {
    library: &'a Library,
    name: String,
    constants: BTreeMap<u32, String>,
}

impl<'a> Kernel<'a> {
    pub(crate) fn new(library: &'a Library, name: &str) -> Self {
        Self { library, name: name.into(), constants: BTreeMap::new() }
    }

    /// Sets a function constant. All have to be set that the kernel, or anything that it names, depends
    /// on, but for those that the file asks about with `is_function_constant_defined`.
    pub fn constant(mut self, index: u32, value: impl Constant) -> Self {
        let bytes: String = value.bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        self.constants.insert(index, format!("{index}:{bytes}"));
        self
    }

    /// A run of it, with nothing bound yet.
    pub fn dispatch(&self) -> Dispatch<'a> {
        Dispatch {
            kernel: self.clone(),
            buffers: BTreeMap::new(),
            threadgroup_memory: BTreeMap::new(),
            seed: 0,
        }
    }
}

#[derive(Clone, Debug)]
enum Contents {
    Given(Vec<u8>),
    Uninitialised(usize),
}

impl Contents {
    fn len(&self) -> usize {
        match self {
            Self::Given(bytes) => bytes.len(),
            Self::Uninitialised(length) => *length,
        }
    }
}

#[derive(Clone, Debug)]
struct Bound {
    contents: Contents,
    offset: usize,
}

/// A run of a kernel that is being prepared.
#[derive(Clone, Debug)]
#[must_use = "a dispatch runs with `threadgroups` or `threads`"]
pub struct Dispatch<'a> {
    kernel: Kernel<'a>,
    buffers: BTreeMap<u32, Bound>,
    threadgroup_memory: BTreeMap<u32, usize>,
    seed: u64,
}

impl Dispatch<'_> {
    fn bind(mut self, index: u32, contents: Contents, offset: usize) -> Self {
        self.buffers.insert(index, Bound { contents, offset });
        self
    }

    /// Binds a buffer with these elements.
    pub fn buffer<T: Element>(self, index: u32, elements: &[T]) -> Self {
        self.buffer_at(index, elements, 0)
    }

    /// Binds a buffer with these elements so that the kernel begins at the element `first`.
    pub fn buffer_at<T: Element>(self, index: u32, elements: &[T], first: usize) -> Self {
        self.bind(index, Contents::Given(bytes_of(elements)), first * T::SIZE)
    }

    /// Binds a buffer for so many elements, which have no value yet: [`Mode::Race`](crate::Mode)
    /// finds a read before a write. What the kernel doesn't write comes back as bytes of `0xff`,
    /// which is NaN.
    pub fn output<T: Element>(self, index: u32, elements: usize) -> Self {
        self.bind(index, Contents::Uninitialised(elements * T::SIZE), 0)
    }

    /// Binds one value.
    pub fn value<T: Element>(self, index: u32, value: T) -> Self {
        self.buffer(index, &[value])
    }

    /// Binds these bytes, such as those of a structure.
    pub fn bytes(self, index: u32, bytes: &[u8]) -> Self {
        self.buffer(index, bytes)
    }

    /// Sets the length of a threadgroup argument in bytes, a multiple of 16.
    pub fn threadgroup_memory(mut self, index: u32, bytes: usize) -> Self {
        self.threadgroup_memory.insert(index, bytes);
        self
    }

    /// The order of the threads between two points where they wait for each other: 0 as they are
    /// numbered (the default), 1 in reverse, else shuffled by this seed.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Runs it in `groups` threadgroups of `size` threads each.
    ///
    /// # Errors
    /// What the run found, as [`Error::Finding`].
    pub fn threadgroups(self, groups: [u32; 3], size: [u32; 3]) -> Result<Buffers, Error> {
        self.run(false, groups, size)
    }

    /// Runs it in `grid` threads, in threadgroups of `size`, of which the last ones are smaller
    /// where the grid isn't a multiple.
    ///
    /// # Errors
    /// What the run found, as [`Error::Finding`].
    pub fn threads(self, grid: [u32; 3], size: [u32; 3]) -> Result<Buffers, Error> {
        self.run(true, grid, size)
    }

    fn run(self, by_threads: bool, grid: [u32; 3], size: [u32; 3]) -> Result<Buffers, Error> {
        let library = self.kernel.library;
        let constants: Vec<String> = self.kernel.constants.values().cloned().collect();
        let worker = library.worker(&constants);
        let mut worker = worker.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let lengths: Vec<usize> = self.buffers.values().map(|bound| bound.contents.len()).collect();
        let request = self.request(by_threads, grid, size);
        let answer = worker.ask(library.program(), &constants, &request, lengths.iter().sum());
        let answer = answer.map_err(|source| Error::Io {
            what: format!("running {}", library.program().display()),
            source,
        })?;
        match answer {
            Ok(bytes) => {
                let mut rest = &bytes[..];
                let mut buffers = BTreeMap::new();
                for (index, length) in self.buffers.keys().zip(lengths) {
                    let (buffer, behind) = rest.split_at(length);
                    buffers.insert(*index, buffer.to_vec());
                    rest = behind;
                }
                Ok(Buffers { buffers })
            }
            Err(report) => Err(self.finding(&report)?.into()),
        }
    }

    /// As `dispatch` in `shim/runtime.cpp` reads it.
    fn request(&self, by_threads: bool, grid: [u32; 3], size: [u32; 3]) -> Vec<u8> {
        let mut request = Vec::new();
        let number = |request: &mut Vec<u8>, number: usize| (number as u64).write(request);
        number(&mut request, self.kernel.name.len());
        request.extend(self.kernel.name.bytes());
        self.seed.write(&mut request);
        number(&mut request, by_threads.into());
        for side in grid.into_iter().chain(size) {
            side.write(&mut request);
        }
        number(&mut request, self.buffers.len());
        for (index, Bound { contents, offset }) in &self.buffers {
            number(&mut request, *index as usize);
            number(&mut request, *offset);
            number(&mut request, contents.len());
            match contents {
                Contents::Given(bytes) => {
                    number(&mut request, 0);
                    request.extend(bytes);
                }
                Contents::Uninitialised(_) => number(&mut request, 1),
            }
        }
        number(&mut request, self.threadgroup_memory.len());
        for (index, length) in &self.threadgroup_memory {
            number(&mut request, *index as usize);
            number(&mut request, *length);
        }
        request
    }

    /// What a process said before it ended: a kind and a message of the runtime, or what the
    /// compiler's checks print.
    fn finding(&self, report: &str) -> Result<Finding, Error> {
        let library = self.kernel.library;
        // A sanitizer may have begun a report of its own.
        let mut lines = report.lines();
        let named = lines.find_map(Fault::named);
        let said: Vec<&str> = lines.collect();
        let (kind, message) = match (named, report.split_once(": runtime error: ")) {
            (Some(kind), _) => (kind, Compiler::get()?.locate(library.program(), &said.join("\n"))),
            (None, Some((place, message))) => {
                let message = message.lines().next().unwrap_or_default();
                let bounds = message.contains("out of bounds");
                let kind = if bounds { Fault::OutOfBounds } else { Fault::Undefined };
                let place = place.lines().next_back().unwrap_or_default();
                (kind, format!("{message}, at {place}"))
            }
            (None, None) => (Fault::Crash, report.trim_end().to_string()),
        };
        Ok(Finding {
            kernel: self.kernel.name.clone(),
            mode: library.mode(),
            seed: self.seed,
            kind,
            message,
        })
    }
}

/// The buffers after a run.
#[derive(Clone, Debug)]
pub struct Buffers {
    buffers: BTreeMap<u32, Vec<u8>>,
}

impl Buffers {
    /// The elements of a buffer.
    ///
    /// # Errors
    /// Nothing was bound at this index, or its size is no multiple of the element's.
    pub fn read<T: Element>(&self, index: u32) -> Result<Vec<T>, Error> {
        let bytes = self
            .buffers
            .get(&index)
            .ok_or_else(|| Error::Usage(format!("buffer({index}) was not bound")))?;
        if bytes.len() % T::SIZE != 0 {
            let (length, size) = (bytes.len(), T::SIZE);
            let message = format!("buffer({index}) has {length} bytes, an element {size}");
            return Err(Error::Usage(message));
        }
        Ok(elements_of(bytes))
    }
}

/// A process that runs dispatches, one after another, until one finds something.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    process: Option<Process>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
}

impl Worker {
    /// The bytes that a dispatch gives, or what the process said before it ended.
    fn ask(
        &mut self,
        program: &Path,
        constants: &[String],
        request: &[u8],
        length: usize,
    ) -> io::Result<Result<Vec<u8>, String>> {
        let mut process = match self.process.take() {
            Some(process) => process,
            None => Process::start(program, constants)?,
        };
        // One byte more tells that a dispatch of nothing has ended.
        let mut answer = vec![0; length + 1];
        let asked = process.input.write_all(request).and_then(|()| process.input.flush());
        if asked.and_then(|()| process.output.read_exact(&mut answer)).is_ok() {
            self.process = Some(process);
            answer.pop();
            return Ok(Ok(answer));
        }
        let Process { child, input, output } = process;
        drop((input, output));
        let ended = child.wait_with_output()?;
        let report = String::from_utf8_lossy(&ended.stderr).into_owned();
        Ok(Err(if report.is_empty() { ended.status.to_string() } else { report }))
    }
}

impl Process {
    fn start(program: &Path, constants: &[String]) -> io::Result<Self> {
        let mut child = Command::new(program)
            .args(constants)
            .env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0:symbolize=0")
            .env("UBSAN_OPTIONS", "print_stacktrace=0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => Ok(Self { child, input, output }),
            _ => Err(io::Error::other("a process without pipes")),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(Process { mut child, input, output }) = self.process.take() {
            // It ends when there is nothing more to read.
            drop((input, output));
            let _ = child.wait();
        }
    }
}
