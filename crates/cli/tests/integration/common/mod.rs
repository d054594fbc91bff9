//! A folder with a tiny model and data, and the program to run on them.

pub mod documents;

use serde_json::Value;
use std::io::{Read, Write};
#[cfg(unix)]
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// The repository's fixtures.
fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// A temporary folder for one test.
pub struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    /// An empty folder.
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    /// A folder with `shape/` (a configuration and a tokenizer), `data/` and `base/`, a model.
    pub fn with_model() -> Self {
        let place = Self::new();
        place.write_data();
        place.write_shape();
        let made = place.run(&[
            "train",
            "--from-config",
            "shape",
            "--fine-tune-type",
            "full",
            "--data",
            "data",
            "--output",
            "base",
            "--steps",
            "1",
            "-q",
        ]);
        assert!(made.status.success(), "{}", text(&made.stderr));
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, content: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    pub fn write_data(&self) {
        let lines = |count: usize, from: usize| -> String {
            (from..from + count)
                .map(|n| {
                    format!(
                        "{{\"messages\": [{{\"role\": \"user\", \"content\": \"What is {n}?\"}}, \
                         {{\"role\": \"assistant\", \"content\": \"A number.\"}}]}}\n"
                    )
                })
                .collect()
        };
        self.write("data/train.jsonl", &lines(12, 0));
        self.write("data/valid.jsonl", &lines(3, 20));
        self.write("data/test.jsonl", &lines(3, 30));
    }

    pub fn write_shape(&self) {
        let config = std::fs::read_to_string(fixtures().join("models/llama/config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["vocab_size"] = 400.into();
        config["max_position_embeddings"] = 256.into();
        // The tokenizer says which token ends a text.
        config.as_object_mut().unwrap().remove("eos_token_id");
        self.write("shape/config.json", &config.to_string());
        for name in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
            let content = std::fs::read_to_string(fixtures().join("tokenizer").join(name)).unwrap();
            self.write(&format!("shape/{name}"), &content);
        }
    }

    /// The program, on the CPU unless the arguments say otherwise: what tests expect is what the CPU gives.
    pub fn command(&self, arguments: &[&str]) -> Command {
        const COMPUTING: [&str; 7] =
            ["train", "evaluate", "logprobs", "generate", "chat", "bench", "demo"];
        let computes = arguments.first().is_some_and(|name| COMPUTING.contains(name))
            && !arguments.contains(&"--server");
        let cpu: &[&str] = match computes && !arguments.contains(&"--device") {
            true => &["--device", "cpu"],
            false => &[],
        };
        let mut command = Command::new(env!("CARGO_BIN_EXE_metal-candle"));
        command
            .args(arguments)
            .args(cpu)
            .current_dir(self.folder.path())
            .env("HF_HUB_OFFLINE", "1")
            .env("HF_HOME", self.path("hub"))
            .env_remove("METAL_CANDLE_LOG")
            .env_remove("METAL_CANDLE_SERVER")
            .env_remove("METAL_CANDLE_API_KEY")
            .env_remove("NO_COLOR")
            .env_remove("CLICOLOR")
            .env_remove("CLICOLOR_FORCE")
            .env("TERM", "xterm")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Starts the program, which ignores these signals and no others.
    #[cfg(unix)]
    pub fn start(&self, arguments: &[&str], ignored: &'static [i32]) -> Child {
        self.start_as(self.command(arguments), ignored)
    }

    /// Starts what ignores these signals and no others.
    #[cfg(unix)]
    pub fn start_as(&self, mut command: Command, ignored: &'static [i32]) -> Child {
        use std::os::unix::process::CommandExt;
        // SAFETY: `signal` may be called between fork and exec.
        unsafe {
            command.pre_exec(move || {
                for signal in [libc::SIGINT, libc::SIGHUP] {
                    let ignore = ignored.contains(&signal);
                    libc::signal(signal, if ignore { libc::SIG_IGN } else { libc::SIG_DFL });
                }
                Ok(())
            });
        }
        command.spawn().unwrap()
    }

    /// Waits until a run that reports every step has taken this many.
    pub fn wait_for_steps(&self, output: &str, steps: usize) {
        let metrics = self.path(output).join("metrics.jsonl");
        wait("training does not start", || {
            std::fs::read_to_string(&metrics).unwrap_or_default().lines().count() >= steps
        });
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs what must succeed and gives stdout.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Runs what must succeed with nothing but JSON on stdout.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let stdout = self.ok(arguments);
        serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}"))
    }

    /// Runs what must end with `code` and gives stderr.
    pub fn fails(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        stderr
    }
}

/// A hub with one data set, which answers whatever is asked of it.
pub fn hub(files: Vec<(String, String)>) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let commit = "0123456789abcdef0123456789abcdef01234567";
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut asked = Vec::new();
            let mut byte = [0];
            while !asked.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
                asked.push(byte[0]);
            }
            let asked = text(&asked);
            let path = asked.split(' ').nth(1).unwrap_or_default();
            let names = files
                .iter()
                .map(|(name, _)| serde_json::json!({ "rfilename": name }))
                .collect::<Vec<_>>();
            let list = serde_json::json!({ "sha": commit, "siblings": names }).to_string();
            let empty = String::new();
            let file = files.iter().find(|(name, _)| path.ends_with(name));
            let (status, body) = match file {
                _ if path.starts_with("/api/datasets/owner/name/revision/main") => (200, &list),
                Some((_, content)) if path.contains(commit) => (200, content),
                _ => (404, &empty),
            };
            let sent = if asked.starts_with("HEAD") { "" } else { body };
            let etag =
                path.bytes().fold(7u64, |hash, byte| hash.wrapping_mul(31) + u64::from(byte));
            let _ = write!(
                stream,
                "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\nETag: \"{etag}\"\r\n\
                 X-Repo-Commit: {commit}\r\n\r\n{sent}",
                body.len()
            );
        }
    });
    address
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Sends a signal to a child that has not been waited for.
#[cfg(unix)]
pub fn send(child: &Child, signal: i32) {
    // SAFETY: the process is ours and has not been waited for, so its number is no other's.
    unsafe { libc::kill(i32::try_from(child.id()).unwrap(), signal) };
}

/// Both ends of a pseudo-terminal of so many columns, or of an unknown number if 0. It ends when nobody has its
/// second end any more, so the processes of other tests, which run at the same time, don't inherit it.
#[cfg(unix)]
pub fn terminal(columns: u16) -> (OwnedFd, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    let mut size = libc::winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let none = std::ptr::null_mut();
    // SAFETY: the pointers are to values of this function, or null where there is nothing to say.
    let opened = unsafe { libc::openpty(&mut ours, &mut theirs, none, none.cast(), &raw mut size) };
    assert_eq!(opened, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: both were opened above and belong to nobody else.
    let ends = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
    for end in [ours, theirs] {
        // SAFETY: the call reads no memory, and both are open.
        assert_eq!(unsafe { libc::fcntl(end, libc::F_SETFD, libc::FD_CLOEXEC) }, 0);
    }
    ends
}

/// Waits until something is so; not even the slowest machine takes as long as this waits.
pub fn wait(complaint: &str, mut is_so: impl FnMut() -> bool) {
    let started = std::time::Instant::now();
    while !is_so() {
        assert!(started.elapsed().as_secs() < 120, "{complaint}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
