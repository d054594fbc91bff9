//! What a launcher (`mpirun`, `srun`, `torchrun`) says of the processes that it has started, in their environment.

use crate::{Error, Result};

/// Processes that a launcher has started together, more than one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    /// How many there are.
    pub size: usize,
    /// This process's number, from 0.
    pub rank: usize,
    /// How many are on this machine, where the launcher says.
    pub on_this_machine: Option<usize>,
    launcher: &'static Launcher,
    variable: &'static str,
}

/// A program that starts several processes.
#[derive(Debug, PartialEq, Eq)]
struct Launcher {
    name: &'static str,
    /// Whether its processes talk over MPI.
    speaks_mpi: bool,
    /// The variables with the number of processes, the own number, and the number on this machine.
    size: &'static str,
    rank: &'static str,
    on_this_machine: Option<&'static str>,
}

/// Those that are known. The first one that is found counts, as `mpirun` may be started where Slurm has its variables.
/// Slurm's are those of a step: outside of `srun` a script has `SLURM_NTASKS` as well, and is one process.
const LAUNCHERS: &[Launcher] = &[
    Launcher {
        name: "mpirun",
        speaks_mpi: true,
        size: "OMPI_COMM_WORLD_SIZE",
        rank: "OMPI_COMM_WORLD_RANK",
        on_this_machine: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
    },
    Launcher {
        name: "mpiexec",
        speaks_mpi: true,
        size: "PMI_SIZE",
        rank: "PMI_RANK",
        on_this_machine: Some("MPI_LOCALNRANKS"),
    },
    Launcher {
        name: "srun",
        speaks_mpi: true,
        size: "SLURM_STEP_NUM_TASKS",
        rank: "SLURM_PROCID",
        on_this_machine: None,
    },
    Launcher {
        name: "torchrun",
        speaks_mpi: false,
        size: "WORLD_SIZE",
        rank: "RANK",
        on_this_machine: Some("LOCAL_WORLD_SIZE"),
    },
];

/// The processes that a launcher has started with this one; `None` where this is the only one.
pub fn launched() -> Option<Launched> {
    find(&|name| std::env::var(name).ok())
}

fn find(variable: &dyn Fn(&str) -> Option<String>) -> Option<Launched> {
    let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
    let (launcher, size, rank) = LAUNCHERS
        .iter()
        .find_map(|launcher| Some((launcher, number(launcher.size)?, number(launcher.rank)?)))?;
    (size > 1).then(|| Launched {
        size,
        rank,
        on_this_machine: launcher.on_this_machine.and_then(number),
        launcher,
        variable: launcher.size,
    })
}

impl Launched {
    /// That these processes can train together in this build.
    ///
    /// # Errors
    /// [`Error::Unsupported`] saying how to build, or what to start them with.
    pub fn check(&self) -> Result<()> {
        let Self { size, launcher, variable, .. } = self;
        let found =
            format!("{} has started {size} processes ({variable} is {size})", launcher.name);
        if !launcher.speaks_mpi {
            return Err(Error::Unsupported(format!(
                "{found}, and processes train together over MPI only: start them with mpirun or srun"
            )));
        }
        if !cfg!(feature = "mpi") {
            return Err(Error::Unsupported(format!(
                "{found}, and this build trains in one; build with --features mpi, for which Open MPI has to be installed"
            )));
        }
        Ok(())
    }

    /// That this is for one process.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what it is.
    pub fn refuse(&self, what: &str) -> Result<()> {
        let Self { size, launcher, variable, .. } = self;
        Err(Error::Unsupported(format!(
            "{what} runs in one process, and {} has started {size} ({variable} is {size})",
            launcher.name
        )))
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
    }

    #[test]
    fn what_cannot_run_together_is_told() {
        let torch = among(&[("WORLD_SIZE", "2"), ("RANK", "1")]).unwrap();
        let told = torch.check().unwrap_err().to_string();
        assert!(told.contains("torchrun has started 2 processes (WORLD_SIZE is 2)"), "{told}");
        assert!(told.contains("mpirun"), "{told}");
        let open_mpi =
            among(&[("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "0")]).unwrap();
        match cfg!(feature = "mpi") {
            true => open_mpi.check().unwrap(),
            false => {
                let told = open_mpi.check().unwrap_err().to_string();
                assert!(told.contains("--features mpi"), "{told}");
            }
        }
        let told = open_mpi.refuse("demo").unwrap_err().to_string();
        assert!(told.contains("demo runs in one process"), "{told}");
    }
}
