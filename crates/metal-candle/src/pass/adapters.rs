//! Which adapter each row of a batch has.

use crate::adapter::Adapter;
use crate::model::Model;
use crate::model::weight::WeightId;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// The adapters of a batch's rows.
#[derive(Clone, Debug)]
pub(super) enum RowAdapters {
    /// The same for all rows, or none.
    Same(Option<Arc<Adapter>>),
    Grouped(Groups),
}

/// The rows of a batch by adapter.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    groups: Vec<Group>,
    /// Where each row of the batch stands once the groups are laid one after the other, `(batch)` u32.
    order: Tensor,
}

#[derive(Clone, Debug)]
struct Group {
    adapter: Option<Arc<Adapter>>,
    /// `(rows)` u32
    rows: Tensor,
}

impl RowAdapters {
    /// One entry a row.
    pub fn of_rows(adapters: &[Option<Arc<Adapter>>], device: &Device) -> Result<Self> {
        let mut groups: Vec<(Option<Arc<Adapter>>, Vec<u32>)> = Vec::new();
        for (row, adapter) in adapters.iter().enumerate() {
            let row = u32::try_from(row).map_err(candle_core::Error::wrap)?;
            let same = |other: &Option<Arc<Adapter>>| match (other, adapter) {
                (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                (None, None) => true,
                _ => false,
            };
            match groups.iter_mut().find(|(other, _)| same(other)) {
                Some((_, rows)) => rows.push(row),
                None => groups.push((adapter.clone(), vec![row])),
            }
        }
        if groups.len() < 2 {
            return Ok(Self::Same(groups.pop().and_then(|(adapter, _)| adapter)));
        }
        let mut order = vec![0; adapters.len()];
        for (place, &row) in groups.iter().flat_map(|(_, rows)| rows).enumerate() {
            order[row as usize] = place as u32;
        }
        let groups = groups
            .into_iter()
            .map(|(adapter, rows)| Ok(Group { adapter, rows: Tensor::new(rows, device)? }))
            .collect::<Result<_>>()?;
        Ok(Self::Grouped(Groups { groups, order: Tensor::new(order, device)? }))
    }

    /// Each of the adapters, without those rows that have none.
    fn adapters(&self) -> impl Iterator<Item = &Adapter> {
        let (one, groups) = match self {
            Self::Same(adapter) => (adapter.as_deref(), None),
            Self::Grouped(groups) => (None, Some(groups.adapters())),
        };
        one.into_iter().chain(groups.into_iter().flatten())
    }

    /// That all of them are adapters of this model.
    pub fn check(&self, model: &Model) -> Result<()> {
        self.adapters().try_for_each(|adapter| adapter.check(model))
    }
}

impl Groups {
    pub fn adapters(&self) -> impl Iterator<Item = &Adapter> {
        self.groups.iter().filter_map(|group| group.adapter.as_deref())
    }

    /// Whether an adapter has something in the place of this weight.
    pub fn replace(&self, id: WeightId) -> bool {
        self.adapters().any(|adapter| adapter.replacement(id).is_some())
    }

    /// What `f` makes of each group's rows of the tensors, `(batch, ..)`, as rows of the batch.
    pub fn map<const N: usize>(
        &self,
        tensors: [&Tensor; N],
        mut f: impl FnMut(Option<&Arc<Adapter>>, [Tensor; N]) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut parts = Vec::with_capacity(self.groups.len());
        for Group { adapter, rows } in &self.groups {
            let mut chosen = Vec::with_capacity(N);
            for tensor in tensors {
                chosen.push(tensor.index_select(rows, 0)?);
            }
            let chosen = chosen.try_into().map_err(|_| {
                Error::option(
                    "adapters",
                    "were given another number of tensors than they chose from",
                )
            })?;
            parts.push(f(adapter.as_ref(), chosen)?);
        }
        Ok(Tensor::cat(&parts, 0)?.index_select(&self.order, 0)?)
    }
}
