//! Work that may overflow the stack, take all memory or never end, in a process of its own.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Set in the process that does the work.
const CHILD: &str = "METAL_CANDLE_TEST_CHILD";
/// How long the work may take. What it finds takes hours, so a slow machine doesn't decide it.
const LIMIT: Duration = Duration::from_secs(120);
/// Address space that the work may take, in bytes.
#[cfg(unix)]
const MEMORY: libc::rlim_t = 6 << 30;

/// Does the work of the test `name` in another process of this program, which is the same test; there, this calls
/// `work`. Fails with what that process wrote when it crashed, took too much memory or did not end.
pub fn isolated(name: &str, work: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some() {
        work();
        return;
    }
    let output = tempfile::NamedTempFile::new().unwrap();
    let writer = output.reopen().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .stdin(Stdio::null())
        .stdout(writer.try_clone().unwrap())
        .stderr(writer);
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        let limit = || {
            let limit = libc::rlimit { rlim_cur: MEMORY, rlim_max: MEMORY };
            // SAFETY: the call reads the limit, which lives through it.
            match unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) } {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        };
        // SAFETY: setting a limit is allowed between fork and exec.
        unsafe { command.pre_exec(limit) };
    }
    let mut child = command.spawn().unwrap();
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if started.elapsed() > LIMIT {
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let text = std::fs::read(output.path()).unwrap();
    let text = String::from_utf8_lossy(&text);
    let end = text.char_indices().rev().nth(3000).map_or(0, |(start, _)| start);
    match status {
        Some(status) if status.success() => {
            assert!(text.contains("1 passed"), "no test is called {name}: {text}");
        }
        Some(status) => panic!("{status}: ...{}", &text[end..]),
        None => panic!("did not end within {LIMIT:?}: ...{}", &text[end..]),
    }
}
