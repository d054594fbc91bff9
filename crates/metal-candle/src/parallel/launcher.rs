//! What a launcher (`torchrun`, `mpirun`, `srun`, or `train --gpus`) says of the processes that it has started, in their
//! environment.

use crate::{Error, Result};
use candle_core::Device;
use std::net::{Ipv4Addr, UdpSocket};

/// Processes that a launcher has started together, more than one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    /// How many there are.
    pub size: usize,
    /// This process's number, from 0.
    pub rank: usize,
    /// How many are on this machine, where the launcher says.
    pub on_this_machine: Option<usize>,
    /// This process's number on this machine, from 0, where the launcher says.
    pub number_here: Option<usize>,
    launcher: &'static Launcher,
    /// Where they can find each other without MPI, if it is said.
    pub(super) meeting: Option<Meeting>,
}

/// Where ranks that have no MPI find rank 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Meeting {
    /// A host and a port there.
    pub address: (String, u16),
    /// The store of `torchrun` is there, in which rank 0 says its own port; otherwise rank 0 itself is.
    pub is_store: bool,
    /// What the processes of one start have in common.
    pub word: String,
    /// Whether all of them are on one machine, where the launcher says.
    pub all_here: Option<bool>,
}

/// A program that starts several processes.
#[derive(Debug, PartialEq, Eq)]
struct Launcher {
    name: &'static str,
    /// A variable that only it sets, if others' processes may have the ones below.
    mark: Option<&'static str>,
    /// Whether its processes talk over MPI.
    speaks_mpi: bool,
    /// The variables with the number of processes and the own number, and with both on this machine.
    size: &'static str,
    rank: &'static str,
    on_this_machine: Option<&'static str>,
    number_here: &'static str,
}

/// The variables that `train --gpus` sets for the processes that it starts.
pub const SIZE: &str = "METAL_CANDLE_PROCESSES";
/// The number of such a process.
pub const RANK: &str = "METAL_CANDLE_RANK";
/// Where rank 0 of them is to be found: a host and a port.
pub const ADDRESS: &str = "METAL_CANDLE_ADDRESS";
/// What they have in common, and nobody else has.
pub const WORD: &str = "METAL_CANDLE_WORD";
/// Where a [`Starter`] hears of rank 0: a host and a port.
pub const STARTER: &str = "METAL_CANDLE_STARTER";

/// How a program that has started ranks on its own machine hears that rank 0 is busy with files, as the other ranks do. It
/// goes on in the process that started them, where they find it by [`STARTER`] and [`WORD`].
#[derive(Debug)]
pub struct Starter {
    socket: UdpSocket,
    word: String,
}

impl Starter {
    /// Listens for ranks that have this word.
    ///
    /// # Errors
    /// When there is no port for it.
    pub fn listen(word: impl Into<String>) -> std::io::Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, word: word.into() })
    }

    /// What [`STARTER`] is for them.
    ///
    /// # Errors
    /// When the system doesn't say.
    pub fn address(&self) -> std::io::Result<String> {
        Ok(self.socket.local_addr()?.to_string())
    }

    /// Whether rank 0 has said that it is busy since this was asked last.
    pub fn hears_busy(&self) -> bool {
        let mut heard = false;
        let mut message = [0; 64];
        while let Ok(length) = self.socket.recv(&mut message) {
            heard |= message.get(..length) == Some(self.word.as_bytes());
        }
        heard
    }
}

/// A rank's way to the [`Starter`] of its run.
#[cfg(any(feature = "cuda", test))]
#[derive(Debug)]
pub(super) struct ToStarter {
    socket: UdpSocket,
    word: String,
}

#[cfg(any(feature = "cuda", test))]
impl ToStarter {
    /// By these variables, if there is one.
    pub fn find(variable: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        let (address, word) = (variable(STARTER)?, variable(WORD)?);
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
        socket.connect(address).ok()?;
        Some(Self { socket, word })
    }

    /// One that has ended needn't hear it.
    pub fn tell_busy(&self) {
        let _ = self.socket.send(self.word.as_bytes());
    }
}

/// Those that are known, the innermost first where one starts another: `torchrun` is started by `mpirun` or `srun` once for
/// each machine, and `mpirun` where Slurm has its variables.
const LAUNCHERS: &[Launcher] = &[
    Launcher {
        name: "--gpus",
        mark: None,
        speaks_mpi: false,
        size: SIZE,
        rank: RANK,
        on_this_machine: Some(SIZE),
        number_here: RANK,
    },
    Launcher { mark: Some("TORCHELASTIC_RUN_ID"), ..TORCHRUN },
    Launcher {
        name: "mpirun",
        mark: None,
        speaks_mpi: true,
        size: "OMPI_COMM_WORLD_SIZE",
        rank: "OMPI_COMM_WORLD_RANK",
        on_this_machine: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        number_here: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Launcher {
        name: "mpiexec",
        mark: None,
        speaks_mpi: true,
        size: PMI_SIZE,
        rank: "PMI_RANK",
        on_this_machine: Some("MPI_LOCALNRANKS"),
        number_here: "MPI_LOCALRANKID",
    },
    TORCHRUN,
    SRUN,
];

/// Others set its variables, too, as Kubernetes' training operator does.
const TORCHRUN: Launcher = Launcher {
    name: "torchrun",
    mark: None,
    speaks_mpi: false,
    size: "WORLD_SIZE",
    rank: "RANK",
    on_this_machine: Some("LOCAL_WORLD_SIZE"),
    number_here: "LOCAL_RANK",
};

/// The variables are those of a step: outside of `srun` a script has `SLURM_NTASKS` as well, and is one process.
const SRUN: Launcher = Launcher {
    name: "srun",
    mark: None,
    speaks_mpi: true,
    size: "SLURM_STEP_NUM_TASKS",
    rank: "SLURM_PROCID",
    on_this_machine: None,
    number_here: "SLURM_LOCALID",
};

/// Which `srun` sets as well, where Slurm speaks PMI-2.
const PMI_SIZE: &str = "PMI_SIZE";

/// What else tells one start of processes from another.
const WORDS: [&str; 5] =
    [WORD, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID"];

/// The processes that a launcher has started with this one; `None` where this is the only one.
pub fn launched() -> Option<Launched> {
    find(&|name| std::env::var(name).ok())
}

fn find(variable: &dyn Fn(&str) -> Option<String>) -> Option<Launched> {
    let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
    let numbers = |launcher: &Launcher| Some((number(launcher.size)?, number(launcher.rank)?));
    let is_marked = |launcher: &Launcher| launcher.mark.is_none_or(|mark| variable(mark).is_some());
    let (mut launcher, (size, rank)) = LAUNCHERS
        .iter()
        .filter(|launcher| is_marked(launcher))
        .find_map(|launcher| Some((launcher, numbers(launcher)?)))?;
    if launcher.size == PMI_SIZE && numbers(&SRUN) == Some((size, rank)) {
        launcher = &SRUN;
    }
    let on_this_machine = launcher.on_this_machine.and_then(number);
    (size > 1).then(|| Launched {
        size,
        rank,
        on_this_machine,
        number_here: number(launcher.number_here),
        launcher,
        meeting: meeting(variable, on_this_machine.map(|here| here >= size)),
    })
}

fn meeting(variable: &dyn Fn(&str) -> Option<String>, all_here: Option<bool>) -> Option<Meeting> {
    let own = || {
        let address = variable(ADDRESS)?;
        let (host, port) = address.rsplit_once(':')?;
        Some((host.to_string(), port.parse().ok()?))
    };
    let torch = || Some((variable("MASTER_ADDR")?, variable("MASTER_PORT")?.trim().parse().ok()?));
    let found = own();
    let is_store = found.is_none()
        && variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|word| word.trim() == "True");
    let address = found.or_else(torch)?;
    let words: Vec<String> = WORDS.iter().map(|name| variable(name).unwrap_or_default()).collect();
    Some(Meeting { address, is_store, word: words.join("/"), all_here })
}

impl Launched {
    /// Whether `train --gpus` has started this process.
    pub fn is_own(&self) -> bool {
        self.launcher.size == SIZE
    }

    /// That these processes can train together on such devices in this build.
    ///
    /// # Errors
    /// [`Error::Unsupported`] saying how to build, or what to start them with.
    pub fn check(&self, device: &Device) -> Result<()> {
        let found = self.found();
        if device.is_metal() {
            return Err(Error::Unsupported(format!(
                "{found}, and processes train together on NVIDIA GPUs and on CPUs only"
            )));
        }
        if device.is_cuda() {
            return match &self.meeting {
                Some(_) => Ok(()),
                None => Err(Error::Unsupported(format!(
                    "{found}, and on GPUs they find each other by MASTER_ADDR and MASTER_PORT, which torchrun sets; set them \
                     to the machine of rank 0 and a free port there"
                ))),
            };
        }
        if !self.launcher.speaks_mpi {
            return Err(Error::Unsupported(format!(
                "{found}, and on CPUs processes train together over MPI only: start them with mpirun or srun"
            )));
        }
        if !cfg!(feature = "mpi") {
            return Err(Error::Unsupported(format!(
                "{found}, and this build trains on CPUs in one; build with --features mpi, for which Open MPI has to be \
                 installed"
            )));
        }
        Ok(())
    }

    /// Which of this machine's GPUs is this process's: one each. Where each process sees one only, it is its own.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when there are fewer than processes, or the launcher doesn't say which process this is here.
    pub fn gpu(&self, gpus: usize) -> Result<usize> {
        let found = self.found();
        match (gpus, self.number_here) {
            (1, _) => Ok(0),
            (_, Some(number)) if number < gpus => Ok(number),
            (_, Some(number)) => Err(Error::Unsupported(format!(
                "{found}, of which this is number {number} on its machine, counted from 0, and {gpus} GPUs are there: one is \
                 needed for each"
            ))),
            (_, None) => Err(Error::Unsupported(format!(
                "{found} without {}, which says which of this machine's {gpus} GPUs is this process's",
                self.launcher.number_here
            ))),
        }
    }

    /// That this is for one process.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what it is.
    pub fn refuse(&self, what: &str) -> Result<()> {
        Err(Error::Unsupported(format!("{what} runs in one process, and {}", self.found())))
    }

    fn found(&self) -> String {
        let Self { size, launcher, .. } = self;
        format!("{} has started {size} processes ({} is {size})", launcher.name, launcher.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn among(variables: &[(&str, &str)]) -> Option<Launched> {
        find(&|name| {
            variables.iter().find(|(it, _)| *it == name).map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn the_starter_hears_that_a_rank_of_its_own_is_busy() {
        let starter = Starter::listen("a start").unwrap();
        assert!(!starter.hears_busy());
        let address = starter.address().unwrap();
        let find = |word: &'static str| {
            ToStarter::find(&|name| match name {
                STARTER => Some(address.clone()),
                _ => (name == WORD).then(|| word.to_string()),
            })
            .unwrap()
        };
        assert!(ToStarter::find(&|_| None).is_none());
        let hears = || {
            let begun = std::time::Instant::now();
            while begun.elapsed() < std::time::Duration::from_secs(2) {
                if starter.hears_busy() {
                    return true;
                }
                std::thread::yield_now();
            }
            false
        };
        find("another start").tell_busy();
        assert!(!hears());
        find("a start").tell_busy();
        assert!(hears());
        assert!(!starter.hears_busy());
    }

    #[test]
    fn launchers_are_known_by_their_variables() {
        assert_eq!(among(&[]), None);
        assert_eq!(among(&[("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "0")]), None);
        // A script of Slurm's that starts one process, and a container that only says how many there are.
        assert_eq!(among(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")]), None);
        assert_eq!(among(&[("WORLD_SIZE", "4")]), None);
        assert_eq!(among(&[("WORLD_SIZE", "many"), ("RANK", "0")]), None);

        let found = among(&[
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_PROCID", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ])
        .unwrap();
        assert_eq!((found.launcher.name, found.size, found.rank), ("mpirun", 4, 3));
        assert_eq!(found.on_this_machine, Some(2));
        let slurm = among(&[("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1")]).unwrap();
        assert_eq!((slurm.launcher.name, slurm.size, slurm.on_this_machine), ("srun", 2, None));
        // Where it speaks PMI-2, Slurm has these as well, but for the number on the machine.
        let mut step = vec![
            ("PMI_SIZE", "2"),
            ("PMI_RANK", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_PROCID", "1"),
            ("SLURM_LOCALID", "1"),
        ];
        let slurm = among(&step).unwrap();
        assert_eq!((slurm.launcher.name, slurm.size, slurm.rank), ("srun", 2, 1));
        assert_eq!(slurm.gpu(8).unwrap(), 1);
        // MPICH's mpiexec, which starts its own processes by srun, one a machine.
        step.extend([("MPI_LOCALRANKID", "3"), ("MPI_LOCALNRANKS", "4")]);
        let steps = step.iter().map(|(name, value)| match *name {
            "PMI_SIZE" => (*name, "8"),
            "PMI_RANK" => (*name, "7"),
            _ => (*name, *value),
        });
        let mpich = among(&steps.collect::<Vec<_>>()).unwrap();
        assert_eq!((mpich.launcher.name, mpich.size, mpich.rank), ("mpiexec", 8, 7));
        assert_eq!((mpich.number_here, mpich.on_this_machine), (Some(3), Some(4)));
        let own = among(&[
            (SIZE, "2"),
            (RANK, "1"),
            (ADDRESS, "127.0.0.1:4000"),
            (WORD, "x"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_RANK", "3"),
        ])
        .unwrap();
        assert!(own.is_own() && own.size == 2 && own.rank == 1, "{own:?}");
        let meeting = own.meeting.unwrap();
        assert_eq!((meeting.address, meeting.is_store), (("127.0.0.1".into(), 4000), false));
        assert_eq!(meeting.all_here, Some(true));
    }

    #[test]
    fn torchrun_counts_before_what_has_started_it() {
        let torchrun = [
            ("TORCHELASTIC_RUN_ID", "none"),
            ("WORLD_SIZE", "16"),
            ("RANK", "13"),
            ("LOCAL_WORLD_SIZE", "8"),
            ("LOCAL_RANK", "5"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "29500"),
        ];
        let pmi = [("PMI_SIZE", "2"), ("PMI_RANK", "1")];
        let srun = [("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1")];
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "1")];
        let alone = [("PMI_SIZE", "1"), ("PMI_RANK", "0")];
        for outer in [&pmi[..], &srun, &open_mpi, &alone, &[pmi, srun].concat()] {
            let found = among(&[&torchrun[..], outer].concat()).unwrap();
            assert_eq!((found.launcher.name, found.size, found.rank), ("torchrun", 16, 13));
            assert_eq!((found.number_here, found.on_this_machine), (Some(5), Some(8)));
            assert_eq!(found.meeting.unwrap().all_here, Some(false));
        }
        // Its words alone are no torchrun: mpirun in a container that has them.
        let found = among(&[&torchrun[1..], &open_mpi[..]].concat()).unwrap();
        assert_eq!((found.launcher.name, found.size), ("mpirun", 2));
    }

    #[test]
    fn what_cannot_run_together_is_told() {
        let cpu = Device::Cpu;
        let torch = among(&[("WORLD_SIZE", "2"), ("RANK", "1")]).unwrap();
        let told = torch.check(&cpu).unwrap_err().to_string();
        assert!(told.contains("torchrun has started 2 processes (WORLD_SIZE is 2)"), "{told}");
        assert!(told.contains("mpirun"), "{told}");
        let open_mpi =
            among(&[("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "0")]).unwrap();
        match cfg!(feature = "mpi") {
            true => open_mpi.check(&cpu).unwrap(),
            false => {
                let told = open_mpi.check(&cpu).unwrap_err().to_string();
                assert!(told.contains("--features mpi"), "{told}");
            }
        }
        let told = open_mpi.refuse("demo").unwrap_err().to_string();
        assert!(told.contains("demo runs in one process"), "{told}");
    }

    #[test]
    fn processes_find_each_other_and_have_a_gpu_each() {
        let torch = |others: &[(&str, &str)]| {
            let mut all = vec![("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1")];
            all.extend(others);
            among(&all).unwrap()
        };
        assert_eq!(torch(&[]).meeting, None);
        assert_eq!(torch(&[("MASTER_ADDR", "a"), ("MASTER_PORT", "99999")]).meeting, None);
        let address = [("MASTER_ADDR", "a"), ("MASTER_PORT", "29500")];
        let found = torch(&address).meeting.unwrap();
        assert_eq!((found.address, found.is_store), (("a".into(), 29500), false));
        let mut stored = address.to_vec();
        stored.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
        assert!(torch(&stored).meeting.unwrap().is_store);
        // Another start of the same run has another word.
        stored.push(("TORCHELASTIC_RESTART_COUNT", "1"));
        assert_ne!(torch(&stored).meeting.unwrap().word, torch(&address).meeting.unwrap().word);

        assert_eq!(torch(&[]).gpu(2).unwrap(), 1);
        assert_eq!(torch(&[]).gpu(1).unwrap(), 0);
        let fourth = among(&[("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "3")]).unwrap();
        let told = fourth.gpu(2).unwrap_err().to_string();
        assert!(told.contains("number 3") && told.contains("2 GPUs"), "{told}");
        let slurm = among(&[("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1")]).unwrap();
        let told = slurm.gpu(2).unwrap_err().to_string();
        assert!(told.contains("SLURM_LOCALID"), "{told}");
    }
}
