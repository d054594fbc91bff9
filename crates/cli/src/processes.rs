//! Several processes of this command that train together: those that a launcher has started, and those that `--gpus`
//! starts, one for each GPU of this machine.

use crate::errors::{FAILURE, SUCCESS, usage};
use crate::interrupt;
use crate::output::{plural, say};
use crate::settings::Processor;
use anyhow::Context;
use candle_core::Device;
use metal_candle::devices;
use metal_candle::parallel::launcher::{self, Launched, Starter, launched};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::str::FromStr;
use std::sync::LazyLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long rank 0 may say nothing of a checkpoint that it saves, once another rank is lost, before the rest ends the run.
pub const TIME_TO_SAVE: Duration = Duration::from_secs(60);
/// How long it may take after that to say so and to end.
const TIME_TO_END: Duration = Duration::from_secs(10);

/// How many GPUs of this machine work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gpus {
    All,
    Count(usize),
}

impl FromStr for Gpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(count @ 1..) => Ok(Self::Count(count)),
            _ if text == "all" => Ok(Self::All),
            _ => Err(format!("`{text}` is neither a number from 1 on nor `all`")),
        }
    }
}

impl Gpus {
    /// The flag that usually says so.
    pub const FLAG: &str = "--gpus";

    /// How many that are here, as this flag asks for.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn count(self, flag: &str) -> anyhow::Result<usize> {
        let found = devices::cuda_count();
        if !cfg!(feature = "cuda") {
            return Err(usage(format!(
                "{flag}: this build has no CUDA, and a Mac has one GPU; build it with --features cuda, see the README"
            )));
        }
        match self {
            _ if found == 0 => Err(usage(format!("{flag}: there is no NVIDIA GPU here"))),
            Self::All => Ok(found),
            Self::Count(count) if count <= found => Ok(count),
            Self::Count(count) => {
                Err(usage(format!("{flag}: {count} are asked for, and this machine has {found}")))
            }
        }
    }

    /// These GPUs, as this flag asks for.
    ///
    /// # Errors
    /// When there are fewer, or another device is asked for.
    pub fn devices(self, asked: Processor, flag: &str) -> anyhow::Result<Vec<Device>> {
        self.device(asked, flag)?;
        Ok((0..self.count(flag)?).map(devices::cuda).collect::<candle_core::Result<_>>()?)
    }

    /// The device for it, as this flag asks for.
    ///
    /// # Errors
    /// When another one is asked for.
    pub fn device(self, asked: Processor, flag: &str) -> anyhow::Result<Processor> {
        match asked {
            Processor::Auto | Processor::Cuda => Ok(Processor::Cuda),
            Processor::Cpu | Processor::Metal => Err(usage(format!(
                "{flag}: is for NVIDIA GPUs, and --device names another device; leave one out"
            ))),
        }
    }
}

/// What lines on stderr begin with, where this isn't the only process and not the one that reports.
pub fn prefix() -> &'static str {
    static PREFIX: LazyLock<String> = LazyLock::new(|| match launched() {
        Some(Launched { rank, .. }) if rank > 0 => format!("[rank {rank}] "),
        _ => String::new(),
    });
    &PREFIX
}

/// That a command that works in one process isn't started as several, which would write the same files.
pub fn refuse(command: &str) -> anyhow::Result<()> {
    match launched() {
        Some(launched) => launched.refuse(command).map_err(usage),
        None => Ok(()),
    }
}

/// That a file can be read by each of the processes that [`start`] starts.
///
/// # Errors
/// When it is a pipe, which would be empty after the first that reads it.
pub fn check_shared(key: &str, path: &Path) -> anyhow::Result<()> {
    if !path.exists() || path.is_file() || path.is_dir() {
        return Ok(());
    }
    Err(usage(format!(
        "{key}: {} is no regular file but a pipe or a device, which one process alone can read, and {} starts several; \
         expected a file",
        path.display(),
        Gpus::FLAG
    )))
}

/// Starts this command once more for each of so many ranks, waits for all of them, and gives the exit code of the run.
/// Ctrl-C and the like are passed on to rank 0, which ends the run in order.
pub fn start(count: usize) -> anyhow::Result<u8> {
    let program = std::env::current_exe().context("this program's own file")?;
    // Free now; rank 0 listens there at once.
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    let address = port.context("a port for the processes to meet at")?.to_string();
    let word = format!("{:016x}", random());
    let starter = Starter::listen(word.as_str()).context("a port for what rank 0 says")?;
    let hears_at = starter.address().context("a port for what rank 0 says")?;
    interrupt::install()?;
    let stop = interrupt::watch("");
    let mut ranks = Ranks::default();
    for rank in 0..count {
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .env(launcher::SIZE, count.to_string())
            .env(launcher::RANK, rank.to_string())
            .env(launcher::ADDRESS, &address)
            .env(launcher::WORD, &word)
            .env(launcher::STARTER, &hears_at);
        if rank > 0 {
            command.stdin(Stdio::null());
        }
        apart(&mut command);
        let child = command.spawn().with_context(|| format!("rank {rank} could not be started"))?;
        ranks.0.push((child, None));
    }
    let others: Vec<u32> = ranks.0.iter().map(|(child, _)| child.id()).collect();
    interrupt::tidy_up_with(move || others.into_iter().for_each(end));
    let mut deadline: Option<Instant> = None;
    let (mut is_told, mut is_killed) = (false, false);
    while ranks.look()? {
        if stop.load(Ordering::SeqCst) && !is_told {
            is_told = true;
            if let Some((child, None)) = ranks.0.first() {
                end(child.id());
            }
        }
        let has_failed = ranks.codes().any(|code| code != Some(i32::from(SUCCESS)));
        let root_has_ended = matches!(ranks.0.first(), Some((_, Some(_))));
        deadline =
            until(deadline, Instant::now(), has_failed, starter.hears_busy(), root_has_ended);
        if !is_killed && deadline.is_some_and(|deadline| Instant::now() > deadline) {
            is_killed = true;
            say("error: the remaining processes don't end; they are killed");
            ranks.kill();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let by_signal = (0..).zip(ranks.codes()).filter(|(_, code)| code.is_none());
    let lost: Vec<String> = by_signal.map(|(rank, _): (usize, _)| rank.to_string()).collect();
    if !lost.is_empty() {
        let them = plural(lost.len() as u64, "process");
        say(format!("error: {them} of {count} ended by a signal: rank {}", lost.join(", ")));
    }
    // That of rank 0, or of the first that failed.
    let code = ranks.codes().find(|code| *code != Some(i32::from(SUCCESS)));
    Ok(match code {
        None => SUCCESS,
        Some(code) => code.and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILURE),
    })
}

/// Until when those that remain may go on, of which this was said before: once one has failed, rank 0 has time to save a
/// checkpoint, and more as long as it says that it is busy, which it doesn't without end; once it has ended, nobody has much.
fn until(
    before: Option<Instant>,
    now: Instant,
    has_failed: bool,
    is_busy: bool,
    root_has_ended: bool,
) -> Option<Instant> {
    let (later, soon) = (now + TIME_TO_SAVE + TIME_TO_END, now + TIME_TO_END);
    let deadline = match before {
        None => has_failed.then_some(later),
        Some(before) if is_busy => Some(before.max(later)),
        Some(before) => Some(before),
    };
    match root_has_ended {
        true => Some(deadline.map_or(soon, |deadline| deadline.min(soon))),
        false => deadline,
    }
}

/// The processes of a run, by rank, with how they ended.
#[derive(Default)]
struct Ranks(Vec<(Child, Option<ExitStatus>)>);

impl Ranks {
    /// Whether one is still at work.
    fn look(&mut self) -> anyhow::Result<bool> {
        let mut runs = false;
        for (child, status) in &mut self.0 {
            if status.is_none() {
                *status = child.try_wait()?;
            }
            runs |= status.is_none();
        }
        Ok(runs)
    }

    /// The exit codes of those that have ended; `None` for one that a signal has ended.
    fn codes(&self) -> impl Iterator<Item = Option<i32>> {
        self.0.iter().filter_map(|(_, status)| status.as_ref()).map(ExitStatus::code)
    }

    fn kill(&mut self) {
        for (child, _) in self.0.iter_mut().filter(|(_, status)| status.is_none()) {
            let _ = child.kill();
        }
    }
}

impl Drop for Ranks {
    /// Where not all could be started.
    fn drop(&mut self) {
        self.kill();
    }
}

/// Numbers that nobody else has, from where the system's own hash tables have theirs.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// A process whose terminal's Ctrl-C is this one's affair, and which is asked to end when this one is killed.
#[cfg(unix)]
fn apart(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    command.process_group(0);
    #[cfg(target_os = "linux")]
    // SAFETY: a system call, which may be made between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
}

/// Asks a process to end.
#[cfg(unix)]
fn end(process: u32) {
    if let Ok(process) = libc::pid_t::try_from(process) {
        // SAFETY: a system call; the process is a child that wasn't waited for, or has ended and is nobody else's yet.
        unsafe { libc::kill(process, libc::SIGTERM) };
    }
}

#[cfg(not(unix))]
fn apart(_: &mut Command) {}

#[cfg(not(unix))]
fn end(_: u32) {}

/// The threads of each of several processes on this machine: a part of its cores, where the launcher has given it none of
/// its own. `None` where rayon finds the number.
pub fn threads(launched: &Launched) -> Option<usize> {
    let here = launched.on_this_machine.filter(|processes| *processes > 1)?;
    if std::env::var_os("RAYON_NUM_THREADS").is_some() || has_own_cores() {
        return None;
    }
    let cores = std::thread::available_parallelism().ok()?.get();
    Some((cores / here).max(1))
}

/// Whether the launcher, which is this process's parent, may use other cores than this process.
#[cfg(target_os = "linux")]
fn has_own_cores() -> bool {
    let cores = |process: &str| {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:").map(String::from))
    };
    let parent = std::os::unix::process::parent_id().to_string();
    match (cores("self"), cores(&parent)) {
        (Some(own), Some(of_parent)) => own != of_parent,
        _ => false,
    }
}

#[cfg(not(target_os = "linux"))]
fn has_own_cores() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_a_number_or_all() {
        assert_eq!("all".parse(), Ok(Gpus::All));
        assert_eq!("2".parse(), Ok(Gpus::Count(2)));
        for wrong in ["0", "-1", "", "some", "1.5"] {
            assert!(wrong.parse::<Gpus>().unwrap_err().contains("all"), "{wrong}");
        }
    }

    #[test]
    fn a_rank_0_that_saves_is_waited_for_when_another_has_failed() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(until(None, begun, false, true, false), None);
        let deadline = until(None, begun, true, false, false);
        assert_eq!(deadline, Some(at(70)));
        // As long as it says so.
        let deadline = until(deadline, at(65), true, true, false);
        assert_eq!(deadline, Some(at(135)));
        let deadline = until(deadline, at(100), true, false, false);
        assert_eq!(deadline, Some(at(135)));
        assert_eq!(until(deadline, at(101), true, false, true), Some(at(111)));
        assert_eq!(until(Some(at(111)), at(105), true, false, true), Some(at(111)));
        assert_eq!(until(None, at(5), false, false, true), Some(at(15)));
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_is_no_file_of_several_processes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.yaml");
        std::fs::write(&file, "rank: 4").unwrap();
        for path in [file.as_path(), folder.path(), Path::new("{{ messages }}")] {
            assert!(check_shared("config", path).is_ok(), "{}", path.display());
        }
        let told = check_shared("config", Path::new("/dev/null")).unwrap_err().to_string();
        assert!(told.starts_with("config: /dev/null is no regular file"), "{told}");
    }

    #[test]
    fn more_gpus_than_there_are_is_an_error() {
        let told = Gpus::Count(100_000).count(Gpus::FLAG).unwrap_err().to_string();
        assert!(told.contains("--gpus"), "{told}");
    }
}
