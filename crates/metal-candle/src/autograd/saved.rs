//! What a backward pass keeps of the forward pass, and where.

use super::{Tape, Value};
use crate::Result;
use candle_core::Tensor;
use metal_candle_kernels::offload::{Offload, Offloaded};
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

/// How a value that costs little is made again from tensors that a backward pass keeps anyway.
#[derive(Clone)]
pub(super) struct Recipe(Arc<dyn Fn() -> Result<Tensor>>);

impl Recipe {
    pub(super) fn new(make: impl Fn() -> Result<Tensor> + 'static) -> Self {
        Self(Arc::new(make))
    }
}

impl fmt::Debug for Recipe {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Recipe")
    }
}

/// A value as a backward pass keeps it.
pub(super) enum Saved {
    Kept(Tensor),
    MadeAgain(Recipe),
}

impl Saved {
    pub(super) fn tensor(&self) -> Result<Tensor> {
        match self {
            Self::Kept(tensor) => Ok(tensor.clone()),
            Self::MadeAgain(recipe) => (recipe.0)(),
        }
    }
}

/// Tensors that a backward pass keeps and nothing else does: on the device, or in the memory of the host until they are
/// asked for.
#[derive(Clone)]
pub(super) struct Stored(Rc<RefCell<Home>>);

enum Home {
    Here(Vec<Tensor>),
    /// With those that stayed in their places.
    Away(Option<Offloaded>, Vec<Option<Tensor>>),
}

impl Stored {
    /// Puts those tensors away, where there is a place, that may leave and don't lie among others.
    pub(super) fn new<'a>(
        tensors: impl Iterator<Item = (&'a Tensor, bool)>,
        offload: Option<&Arc<Offload>>,
    ) -> Result<Self> {
        let (mut leave, mut stay) = (Vec::new(), Vec::new());
        for (tensor, may_leave) in tensors {
            if offload.is_some() && may_leave && tensor.is_contiguous() {
                leave.push(tensor.clone());
                stay.push(None);
            } else {
                stay.push(Some(tensor.clone()));
            }
        }
        let home = match offload {
            Some(offload) if !leave.is_empty() => Home::Away(Some(offload.put(&leave)?), stay),
            _ => Home::Here(stay.into_iter().flatten().collect()),
        };
        Ok(Self(Rc::new(RefCell::new(home))))
    }

    /// The tensors, on the device, where they are until this and its clones are dropped.
    pub(super) fn tensors(&self) -> Result<Vec<Tensor>> {
        let mut home = self.0.borrow_mut();
        let (offloaded, stayed) = match &mut *home {
            Home::Here(tensors) => return Ok(tensors.clone()),
            Home::Away(offloaded, stayed) => (offloaded.take(), std::mem::take(stayed)),
        };
        let missing = || candle_core::Error::msg("what was put away didn't come back");
        let mut back = offloaded.ok_or_else(missing)?.take()?.into_iter();
        let all = stayed.into_iter().map(|stayed| stayed.or_else(|| back.next()));
        let tensors = all.collect::<Option<Vec<_>>>().ok_or_else(missing)?;
        *home = Home::Here(tensors.clone());
        Ok(tensors)
    }

    /// As many as were stored.
    pub(super) fn array<const N: usize>(&self) -> Result<[Tensor; N]> {
        let tensors = self.tensors()?;
        let count = tensors.len();
        tensors.try_into().map_err(|_| {
            candle_core::Error::msg(format!("{count} tensors were stored, expected {N}")).into()
        })
    }
}

impl Tape {
    /// The value for a backward pass. It is made again rather than kept if there is a way; not in a segment that is
    /// run again, as its backward pass comes next.
    pub(super) fn save(&self, value: &Value) -> Saved {
        match value.recipe() {
            Some(recipe) if !self.is_replaying() => Saved::MadeAgain(recipe.clone()),
            _ => Saved::Kept(value.tensor().clone()),
        }
    }

    /// Keeps values for a backward pass that nothing else keeps, off the device where this tape has such a place.
    pub(super) fn store(&self, values: &[&Value]) -> Result<Stored> {
        let offload = self.offload().filter(|_| values.iter().any(|it| it.needs_gradient()));
        Stored::new(values.iter().map(|value| (value.tensor(), !value.is_kept())), offload)
    }
}
