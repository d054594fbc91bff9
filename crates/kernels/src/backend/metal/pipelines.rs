//! The pipelines that were made, by their device, kernel and function constants.

use super::{Constant, Kernel};

/// Pipelines `P` of devices `D`. There are few: a search that compares addresses of names is faster than one
/// that reads them.
pub(super) struct Pipelines<D, P> {
    known: Vec<Known<D, P>>,
}

struct Known<D, P> {
    device: D,
    name: &'static str,
    constants: Box<[(usize, Constant)]>,
    pipeline: P,
}

impl<D: Copy + PartialEq, P: Clone> Pipelines<D, P> {
    pub(super) const fn new() -> Self {
        Self { known: Vec::new() }
    }

    /// The pipeline of the kernel if there is one.
    pub(super) fn find(&self, device: D, kernel: Kernel) -> Option<P> {
        let found = self.known.iter().find(|known| {
            std::ptr::eq(known.name, kernel.name)
                && known.device == device
                && *known.constants == *kernel.constants
        });
        found.map(|known| known.pipeline.clone())
    }

    pub(super) fn add(&mut self, device: D, kernel: Kernel, pipeline: P) {
        let Kernel { name, constants } = kernel;
        self.known.push(Known { device, name, constants: constants.into(), pipeline });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipeline_is_found_for_its_device_kernel_and_constants_alone() {
        let constants = |first, second| [(0, Constant::Bool(first)), (3, Constant::U16(second))];
        let mut pipelines = Pipelines::new();
        let mut made = Vec::new();
        for device in [1, 2] {
            for name in ["one", "other"] {
                for constants in [constants(false, 0), constants(true, 0), constants(false, 1)] {
                    let kernel = Kernel { name, constants: &constants };
                    assert_eq!(pipelines.find(device, kernel), None);
                    pipelines.add(device, kernel, made.len());
                    made.push((device, name, constants));
                }
                assert_eq!(pipelines.find(device, name.into()), None);
            }
        }
        for (index, (device, name, constants)) in made.iter().enumerate() {
            let kernel = Kernel { name, constants };
            assert_eq!(pipelines.find(*device, kernel), Some(index));
        }
    }
}
