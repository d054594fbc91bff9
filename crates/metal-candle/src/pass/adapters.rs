//! Which adapter each row of a batch has.

use crate::adapter::{Adapter, AdapterVersion, UnitName, Whole};
use crate::autograd::Value;
use crate::model::Model;
use crate::model::layer::Linear;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use metal_candle_kernels::{copy, lora_rows};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The adapters of a batch's rows.
#[derive(Clone, Debug)]
pub(super) enum RowAdapters {
    /// The same for all rows, or none.
    Same(Option<Arc<Adapter>>),
    Grouped(Groups),
    /// Those of the updates, and nothing besides.
    Updated(Arc<RowUpdates>),
}

/// The rows of a batch by adapter.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    groups: Vec<Group>,
    /// Rows of the batch.
    count: usize,
    device: Device,
    /// Made where they are first asked for.
    on_device: Arc<OnceLock<OnDevice>>,
}

#[derive(Clone, Debug)]
struct Group {
    adapter: Option<Arc<Adapter>>,
    rows: Vec<u32>,
}

/// Where rows are, u32.
#[derive(Debug)]
struct OnDevice {
    /// The rows of each group.
    rows: Vec<Tensor>,
    /// Where each row of the batch stands once the groups are laid one after the other, `(batch)`.
    order: Tensor,
}

impl RowAdapters {
    /// One entry a row. Where all are the same, products have the adapter in them, unless its rows are `apart`: then they
    /// are computed as beside rows of others.
    pub fn of_rows(
        adapters: &[Option<Arc<Adapter>>],
        apart: bool,
        device: &Device,
    ) -> Result<Self> {
        let mut groups: Vec<(Option<Arc<Adapter>>, Vec<u32>)> = Vec::new();
        for (row, adapter) in adapters.iter().enumerate() {
            let row = u32::try_from(row).map_err(candle_core::Error::wrap)?;
            let same = |other: &Option<Arc<Adapter>>| {
                other.as_ref().map(Arc::as_ptr) == adapter.as_ref().map(Arc::as_ptr)
            };
            match groups.iter_mut().find(|(other, _)| same(other)) {
                Some((_, rows)) => rows.push(row),
                None => groups.push((adapter.clone(), vec![row])),
            }
        }
        if groups.len() < 2 && !(apart && groups.iter().any(|(adapter, _)| adapter.is_some())) {
            return Ok(Self::Same(groups.pop().and_then(|(adapter, _)| adapter)));
        }
        let groups = groups.into_iter().map(|(adapter, rows)| Group { adapter, rows }).collect();
        let (count, device, on_device) = (adapters.len(), device.clone(), Arc::default());
        Ok(Self::Grouped(Groups { groups, count, device, on_device }))
    }

    /// Each of the adapters, without those rows that have none.
    fn adapters(&self) -> impl Iterator<Item = &Adapter> {
        let (one, groups) = match self {
            Self::Same(adapter) => (adapter.as_deref(), None),
            Self::Grouped(groups) => (None, Some(groups.adapters())),
            // They were checked when the updates were made.
            Self::Updated(_) => (None, None),
        };
        one.into_iter().chain(groups.into_iter().flatten())
    }

    /// The adapter that something is computed with for all rows, or none where no adapter changes it, as `changes` says.
    /// Where one of several does: the rows by adapter.
    pub fn in_common(
        &self,
        changes: impl Fn(&Adapter) -> bool,
    ) -> std::result::Result<Option<&Arc<Adapter>>, &Groups> {
        match self {
            Self::Same(adapter) => Ok(adapter.as_ref()),
            Self::Grouped(groups) if groups.adapters().any(changes) => Err(groups),
            Self::Grouped(_) | Self::Updated(_) => Ok(None),
        }
    }

    /// That all of them are adapters of this model.
    pub fn check(&self, model: &Model) -> Result<()> {
        self.adapters().try_for_each(|adapter| adapter.check(model))
    }

    /// The parameters of a unit, where several processes have a part of them each; `next` begins to come.
    pub fn bring(&self, unit: UnitName, next: Option<UnitName>) -> Result<Option<Arc<Whole>>> {
        match self {
            Self::Same(Some(adapter)) => adapter.bring(unit, next),
            _ if self.adapters().any(|adapter| adapter.shards().is_some()) => {
                Err(Error::Unsupported(
                    "rows with different adapters of which several processes have a part each"
                        .into(),
                ))
            }
            _ => Ok(None),
        }
    }

    /// What the adapters add to the results of linear layers of `model` for a batch of `seq` tokens a row, where they
    /// differ from row to row. `known` is asked first.
    pub fn updates(
        &self,
        model: &Model,
        seq: usize,
        known: Option<&KnownUpdates>,
    ) -> Result<Option<Arc<RowUpdates>>> {
        let groups = match self {
            Self::Same(_) => return Ok(None),
            Self::Grouped(groups) => groups,
            Self::Updated(updates) => return Ok(Some(updates.clone())),
        };
        let adapters: Vec<_> = groups.groups.iter().filter_map(|it| it.adapter.as_ref()).collect();
        let updates = match known {
            Some(known) => known.of(&adapters, model)?,
            None => Arc::new(Updates::new(&adapters, model)?),
        };
        let mut of_rows = vec![None; groups.count * seq];
        for Group { adapter, rows } in &groups.groups {
            let place = adapter.as_ref().and_then(|adapter| updates.place(adapter));
            for row in rows {
                of_rows[*row as usize * seq..][..seq].fill(place);
            }
        }
        let rows = lora_rows::Rows::new(&of_rows, &groups.device)?;
        Ok(Some(Arc::new(RowUpdates { updates, rows })))
    }
}

impl Groups {
    pub fn adapters(&self) -> impl Iterator<Item = &Adapter> {
        self.groups.iter().filter_map(|group| group.adapter.as_deref())
    }

    /// What `f` makes of each group's rows of the tensors, `(batch, ..)`, as rows of the batch.
    pub fn map<const N: usize>(
        &self,
        tensors: [&Tensor; N],
        mut f: impl FnMut(Option<&Arc<Adapter>>, [Tensor; N]) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let on_device = self.on_device()?;
        // Candle chooses wrong rows of a view on Metal.
        let tensors = tensors.map(copy::contiguous);
        let tensors = tensors.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
        let mut parts = Vec::with_capacity(self.groups.len());
        for (Group { adapter, .. }, rows) in self.groups.iter().zip(&on_device.rows) {
            let mut chosen = Vec::with_capacity(N);
            for tensor in &tensors {
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
        Ok(Tensor::cat(&parts, 0)?.index_select(&on_device.order, 0)?)
    }

    fn on_device(&self) -> Result<&OnDevice> {
        if let Some(made) = self.on_device.get() {
            return Ok(made);
        }
        let mut order = vec![0u32; self.count];
        let rows = self.groups.iter().flat_map(|group| &group.rows);
        for (place, &row) in (0..).zip(rows) {
            order[row as usize] = place;
        }
        let rows = self.groups.iter().map(|group| Tensor::new(group.rows.as_slice(), &self.device));
        let made = OnDevice {
            rows: rows.collect::<candle_core::Result<_>>()?,
            order: Tensor::new(order, &self.device)?,
        };
        Ok(self.on_device.get_or_init(|| made))
    }
}

/// What the adapters of a batch's rows add to the results of linear layers.
#[derive(Debug)]
pub(super) struct RowUpdates {
    updates: Arc<Updates>,
    rows: lora_rows::Rows,
}

impl RowUpdates {
    /// Of rows that have any of these adapters, as numbers that others with as many rows may take the place of: see
    /// [`lora_rows::Rows::with_room`].
    pub fn with_room(
        updates: &Arc<Updates>,
        adapters: &[Option<&Arc<Adapter>>],
        device: &Device,
    ) -> Result<Self> {
        let place = |adapter: &Option<&Arc<Adapter>>| {
            let Some(adapter) = adapter else { return Ok(None) };
            updates.place(adapter).map(Some).ok_or_else(|| {
                Error::option("adapters", "are others than those that were laid out")
            })
        };
        let of_rows = adapters.iter().map(place).collect::<Result<Vec<_>>>()?;
        let rows = lora_rows::Rows::with_room(&of_rows, updates.adapters.len(), device)?;
        Ok(Self { updates: updates.clone(), rows })
    }

    /// What a GPU reads of the rows.
    pub fn numbers(&self) -> &[u32] {
        self.rows.numbers()
    }

    /// The same, of which a GPU reads the numbers that are given here.
    pub fn reading(&self, numbers: &Tensor) -> Result<Self> {
        Ok(Self { updates: self.updates.clone(), rows: self.rows.reading(numbers)? })
    }

    /// Adds the updates of layers that read the same `x` to what the frozen weights gave, in place. Where an adapter's
    /// part in a layer is more than an update, its rows stay as they are.
    pub fn add(&self, layers: &[&Linear], x: &Tensor, outputs: &[Value]) -> Result<()> {
        let outputs = outputs.iter().map(Value::tensor);
        let layers: Vec<_> = layers.iter().map(|layer| layer.index).zip(outputs).collect();
        Ok(lora_rows::add_updates(x, &layers, &self.updates.laid_out, &self.rows)?)
    }
}

/// The updates of some adapters for all linear layers of a model, by [`Linear::index`].
#[derive(Debug)]
pub(crate) struct Updates {
    laid_out: lora_rows::Adapters,
    /// Which adapters they are, and whether their updates are all that they change.
    adapters: Vec<(AdapterVersion, bool)>,
}

impl Updates {
    fn new(adapters: &[&Arc<Adapter>], model: &Model) -> Result<Self> {
        let (count, dtype) = (model.linears().count(), model.dtype());
        let (mut all, mut of_adapters) = (Vec::new(), Vec::new());
        for adapter in adapters {
            let generation = adapter.parameters().generation();
            let mut factors = vec![None; count];
            for linear in model.linears().filter(|linear| !adapter.is_apart(linear)) {
                if let Some(update) = adapter.update(linear) {
                    factors[linear.index] = Some(update.factors(generation, dtype)?);
                }
            }
            all.push(factors);
            of_adapters.push((AdapterVersion::of(adapter), adapter.is_updates_alone()));
        }
        let laid_out = lora_rows::Adapters::new(&all, dtype, model.device())?;
        Ok(Self { laid_out, adapters: of_adapters })
    }

    /// Where an adapter is among them, as its parameters are now.
    fn place(&self, adapter: &Arc<Adapter>) -> Option<usize> {
        let version = AdapterVersion::of(adapter);
        self.adapters.iter().position(|(other, _)| *other == version)
    }

    /// Whether all that these adapters change are their updates.
    pub fn are_all_of(&self, adapters: &[&Arc<Adapter>]) -> bool {
        let is_all = |adapter| self.place(adapter).is_some_and(|place| self.adapters[place].1);
        adapters.iter().copied().all(is_all)
    }
}

/// Adapters that are kept laid out at most, where a pass has no more.
const MOST_KNOWN: usize = 1024;

/// The updates of the adapters that passes had, as long as those are there, for the next passes.
#[derive(Debug, Default)]
pub(crate) struct KnownUpdates(Mutex<Option<Arc<Updates>>>);

impl KnownUpdates {
    /// Those of these adapters and others.
    pub fn of(&self, adapters: &[&Arc<Adapter>], model: &Model) -> Result<Arc<Updates>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<Arc<Adapter>> = Vec::new();
        if let Some(updates) = known.as_ref() {
            // The memory of adapters that are gone is given back.
            let live = updates.adapters.iter().all(|(version, _)| version.is_current());
            if live && adapters.iter().all(|adapter| updates.place(adapter).is_some()) {
                return Ok(updates.clone());
            }
            let others = updates.adapters.iter().filter_map(|(version, _)| version.current());
            all.extend(others.filter(|other| !adapters.iter().any(|new| Arc::ptr_eq(new, other))));
        }
        // Before memory is taken for others.
        *known = None;
        let others = all.len().saturating_sub(MOST_KNOWN.saturating_sub(adapters.len()));
        let all: Vec<_> = all.iter().skip(others).chain(adapters.iter().copied()).collect();
        let updates = Arc::new(Updates::new(&all, model)?);
        *known = Some(updates.clone());
        Ok(updates)
    }
}
