//! Values, nodes and the walk back through them.

use super::saved::{Recipe, Stored};
use crate::Result;
use candle_core::{Device, Shape, Tensor};
use metal_candle_kernels::offload::Offload;
use metal_candle_kernels::{arithmetic, embedding};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names one trainable tensor in the parameter store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParameterId(pub usize);

/// A tensor that can be trained: a view of the parameter `id` in the flat buffer.
#[derive(Clone, Debug)]
pub struct Parameter {
    tensor: Tensor,
    id: ParameterId,
}

impl Parameter {
    /// The view `tensor` of the parameter `id`.
    pub fn new(tensor: Tensor, id: ParameterId) -> Self {
        Self { tensor, id }
    }

    /// The tensor as it is now.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Where its gradient goes.
    pub fn id(&self) -> ParameterId {
        self.id
    }
}

/// Receives the gradients of parameters in the order in which they are known, possibly in several parts that
/// have to be added.
pub trait GradientSink {
    /// Takes over one contribution to the gradient of `id`.
    fn accept(&mut self, id: ParameterId, gradient: Tensor) -> Result<()>;

    /// Takes over several, in this order. A backward pass calls this with neighbouring small ones.
    fn accept_all(&mut self, gradients: Vec<(ParameterId, Tensor)>) -> Result<()> {
        gradients.into_iter().try_for_each(|(id, gradient)| self.accept(id, gradient))
    }

    /// Takes over one contribution to the gradient of the table `id`, that of the rows that were looked up.
    fn accept_rows(&mut self, id: ParameterId, gradient: TableGradient) -> Result<()> {
        let TableGradient { rows, ids, height } = gradient;
        self.accept(id, embedding::backward(&rows, &ids, height)?)
    }
}

/// The gradient of a table `(height, hidden)` as that of its rows that were looked up.
#[derive(Debug)]
pub struct TableGradient {
    /// That of each, `(batch, seq, hidden)`.
    pub rows: Tensor,
    /// Which rows they are, `(batch, seq)` in u32.
    pub ids: Tensor,
    /// How many rows the table has.
    pub height: usize,
}

impl<F: FnMut(ParameterId, Tensor) -> Result<()>> GradientSink for F {
    fn accept(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        self(id, gradient)
    }
}

/// Tells a tape from every other one in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TapeId(u64);

impl TapeId {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// One output of one node of a tape.
#[derive(Clone, Copy, Debug)]
struct Slot {
    tape: TapeId,
    node: usize,
    output: usize,
}

/// A tensor in a forward pass. It remembers where it came from only if a trainable parameter
/// feeds it.
#[derive(Clone, Debug)]
pub struct Value {
    tensor: Tensor,
    slot: Option<Slot>,
    recipe: Option<Recipe>,
    /// Which of the tape's skippable operations gave it.
    skippable: Option<usize>,
    /// Whether the operation that gave it keeps it for its own backward pass.
    kept: bool,
}

impl Value {
    fn new(tensor: Tensor, slot: Option<Slot>) -> Self {
        Self { tensor, slot, recipe: None, skippable: None, kept: false }
    }

    /// Of the skippable operation with this number, if it has one.
    pub(super) fn numbered(mut self, skippable: Option<usize>) -> Self {
        self.skippable = skippable;
        self
    }

    /// With whether the operation that gave it, or what it is a view of, keeps it.
    pub(super) fn kept(mut self, kept: bool) -> Self {
        self.kept = kept;
        self
    }

    pub(super) fn is_kept(&self) -> bool {
        self.kept
    }

    /// The tensor itself. An operation that computes from it names the value among its inputs when it is
    /// pushed: by that the tape knows whether the tensor is needed.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Takes the tensor out.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }

    /// Whether a gradient will reach this value.
    pub fn needs_gradient(&self) -> bool {
        self.slot.is_some()
    }

    /// Adds how the value can be made again from tensors that are kept anyway.
    pub(super) fn with_recipe(mut self, make: impl Fn() -> Result<Tensor> + 'static) -> Self {
        self.recipe = Some(Recipe::new(make));
        self
    }

    pub(super) fn recipe(&self) -> Option<&Recipe> {
        self.recipe.as_ref()
    }

    /// The dimensions of the tensor.
    pub fn shape(&self) -> &Shape {
        self.tensor.shape()
    }
}

/// Gradients of a node's outputs in, gradients of its inputs out; `None` where there is none.
type Gradients = Vec<Option<Tensor>>;
type Backward = Box<dyn FnOnce(Gradients, &mut dyn GradientSink) -> Result<Gradients>>;

enum Node {
    Parameter(ParameterId),
    Operation { inputs: Vec<Option<Slot>>, outputs: usize, backward: Backward },
}

/// A part of a forward pass that can be run again: values in, values out.
pub type Segment = Arc<dyn Fn(&Tape, &[Value]) -> Result<Vec<Value>>>;

/// The operations of one forward pass, for its backward pass.
pub struct Tape {
    id: TapeId,
    nodes: RefCell<Vec<Node>>,
    training: bool,
    checkpointing: bool,
    dropout_seed: Option<u64>,
    /// Where what only the backward pass reads waits for it, off the device.
    offload: Option<Arc<Offload>>,
    /// Set while a segment is run again for its gradients.
    replaying: bool,
    /// Set when a parameter was read, also on a tape that keeps no nodes.
    touched: Cell<bool>,
    /// What a segment keeps for its second run, in the order of its operations; `None` where there will
    /// be none.
    kept: RefCell<Option<VecDeque<[Tensor; 2]>>>,
    skippable: RefCell<Skippable>,
}

/// The operations of a segment whose results may be left out in its second run, because its backward pass
/// doesn't need them: sums and projections whose result, in the end, is only the segment's. They are
/// numbered in their order, which is the same in both runs.
#[derive(Default)]
enum Skippable {
    /// Outside of segments nothing is left out.
    #[default]
    None,
    /// In the first run: whether something reads each result, and what it is a sum of.
    Tracing(Vec<(bool, Vec<usize>)>),
    /// In the second: what is left out, and how many came before.
    Skipping(Vec<bool>, usize),
}

impl Skippable {
    /// The number of a further one, which adds up results with these numbers, and whether to leave it out.
    fn next(&mut self, addends: impl Iterator<Item = usize>) -> (Option<usize>, bool) {
        match self {
            Self::None => (None, false),
            Self::Tracing(operations) => {
                operations.push((false, addends.collect()));
                (Some(operations.len() - 1), false)
            }
            Self::Skipping(skipped, count) => {
                let skip = skipped.get(*count).copied().unwrap_or(false);
                *count += 1;
                (None, skip)
            }
        }
    }

    fn read(&mut self, number: usize) {
        if let Self::Tracing(operations) = self
            && let Some((read, _)) = operations.get_mut(number)
        {
            *read = true;
        }
    }

    /// What the second run leaves out, once the first is over.
    fn skipped(self) -> Vec<bool> {
        let Self::Tracing(mut operations) = self else { return Vec::new() };
        // A sum comes after its addends.
        for number in (0..operations.len()).rev() {
            if let Some((true, addends)) = operations.get(number).cloned() {
                for addend in addends {
                    operations[addend].0 = true;
                }
            }
        }
        operations.into_iter().map(|(read, _)| !read).collect()
    }
}

impl Tape {
    /// A tape that keeps a node of whatever depends on a parameter.
    pub fn training() -> Self {
        Self {
            id: TapeId::new(),
            nodes: RefCell::default(),
            training: true,
            checkpointing: false,
            dropout_seed: None,
            offload: None,
            replaying: false,
            touched: Cell::new(false),
            kept: RefCell::new(None),
            skippable: RefCell::default(),
        }
    }

    /// A tape that keeps no nodes, for evaluation and generation.
    pub fn inference() -> Self {
        Self { training: false, ..Self::training() }
    }

    /// Runs segments again in the backward pass instead of storing their activations, but for what
    /// attention gives (gradient checkpointing; Chen et al., 2016, arXiv:1604.06174).
    #[must_use]
    pub fn with_checkpointing(mut self, checkpointing: bool) -> Self {
        self.checkpointing = checkpointing;
        self
    }

    /// Has activations wait for the backward pass in the memory of the host: what segments that are run again keep, and
    /// without them queries, keys, values and gates.
    #[must_use]
    pub fn with_offload(mut self, offload: Option<Arc<Offload>>) -> Self {
        self.offload = offload;
        self
    }

    /// Switches dropout on, whose masks follow from `seed`.
    #[must_use]
    pub fn with_dropout(mut self, seed: u64) -> Self {
        self.dropout_seed = Some(seed);
        self
    }

    /// Whether this tape keeps nodes of what depends on a parameter.
    pub fn is_training(&self) -> bool {
        self.training
    }

    /// Whether this tape runs segments again.
    pub fn is_checkpointing(&self) -> bool {
        self.checkpointing
    }

    /// What the masks of dropout follow from; `None` where there is no dropout.
    pub fn dropout_seed(&self) -> Option<u64> {
        self.dropout_seed
    }

    /// Where what is stored waits, off the device.
    pub(super) fn offload(&self) -> Option<&Arc<Offload>> {
        self.offload.as_ref()
    }

    /// Whether a segment is run again for its gradients.
    pub(crate) fn is_replaying(&self) -> bool {
        self.replaying
    }

    /// Whether what is computed is neither recorded nor computed again.
    pub(crate) fn computes_once(&self) -> bool {
        !self.training && matches!(*self.skippable.borrow(), Skippable::None)
    }

    /// Numbers an operation that may be left out, which adds up `addends` or, if there are none, computes
    /// from its inputs. Gives its number, for [`Value::skippable`], and whether to leave its result out.
    pub(super) fn skippable(&self, addends: &[&Value]) -> (Option<usize>, bool) {
        self.skippable.borrow_mut().next(addends.iter().filter_map(|value| value.skippable))
    }

    /// Notes that an operation computes from these values.
    fn note_reading(&self, inputs: &[&Value]) {
        let mut skippable = self.skippable.borrow_mut();
        for number in inputs.iter().filter_map(|value| value.skippable) {
            skippable.read(number);
        }
    }

    /// What `compute` gives. In a segment that is run twice its results are kept from the first run to the
    /// second, for operations that cost much more to repeat than to hold.
    pub(super) fn keep(
        &self,
        compute: impl FnOnce() -> Result<[Tensor; 2]>,
    ) -> Result<[Tensor; 2]> {
        if self.replaying
            && let Some(kept) = self.kept.borrow_mut().as_mut().and_then(VecDeque::pop_front)
        {
            return Ok(kept);
        }
        let results = compute()?;
        if !self.replaying
            && let Some(kept) = self.kept.borrow_mut().as_mut()
        {
            kept.push_back(results.clone());
        }
        Ok(results)
    }

    /// How many nodes it has.
    pub fn len(&self) -> usize {
        self.nodes.borrow().len()
    }

    /// Whether it has no nodes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A value that gets no gradient.
    pub fn constant(&self, tensor: Tensor) -> Value {
        Value::new(tensor, None)
    }

    /// A parameter as a value, which becomes a leaf.
    pub fn parameter(&self, parameter: &Parameter) -> Value {
        self.touched.set(true);
        let slot = self.training.then(|| self.add_node(Node::Parameter(parameter.id)));
        Value::new(parameter.tensor.clone(), slot)
    }

    /// Pushes an operation with one output. `backward` turns the gradient of the output into one
    /// gradient for each of `inputs`, in order; those of inputs that need none are dropped, so it
    /// should not compute them.
    ///
    /// # Errors
    /// For an input that is a value of another tape.
    pub fn push<F>(&self, inputs: &[&Value], output: Tensor, backward: F) -> Result<Value>
    where
        F: FnOnce(Tensor) -> Result<Gradients> + 'static,
    {
        self.note_reading(inputs);
        self.push_sum(inputs, output, backward)
    }

    /// Like [`Self::push`], of an operation whose backward pass reads no input.
    pub(super) fn push_sum<F>(
        &self,
        inputs: &[&Value],
        output: Tensor,
        backward: F,
    ) -> Result<Value>
    where
        F: FnOnce(Tensor) -> Result<Gradients> + 'static,
    {
        self.check(inputs)?;
        if inputs.iter().all(|input| input.slot.is_none()) {
            return Ok(self.constant(output));
        }
        let slot = self.add_node(Node::Operation {
            inputs: inputs.iter().map(|input| input.slot).collect(),
            outputs: 1,
            backward: Box::new(move |mut gradients, _| match gradients.pop().flatten() {
                Some(gradient) => backward(gradient),
                None => Ok(Vec::new()),
            }),
        });
        Ok(Value::new(output, Some(slot)))
    }

    /// Pushes the rows of a parameter, whose gradient goes to the sink as they are; `None` for what is none.
    pub(super) fn push_rows(
        &self,
        table: &Value,
        rows: &Tensor,
        ids: &Tensor,
    ) -> Result<Option<Value>> {
        self.check(&[table])?;
        let nodes = self.nodes.borrow();
        let Some(Node::Parameter(id)) = table.slot.and_then(|slot| nodes.get(slot.node)) else {
            return Ok(None);
        };
        let id = *id;
        drop(nodes);
        self.note_reading(&[table]);
        let (ids, height) = (ids.clone(), table.tensor.dim(0)?);
        let backward = move |mut gradients: Gradients, sink: &mut dyn GradientSink| {
            if let Some(rows) = gradients.pop().flatten() {
                sink.accept_rows(id, TableGradient { rows, ids, height })?;
            }
            Ok(Vec::new())
        };
        Ok(self.add_operation(&[], vec![rows.clone()], Box::new(backward)).pop())
    }

    /// Pushes an operation with several outputs. The gradient of an output that nothing used is
    /// `None`.
    ///
    /// # Errors
    /// For an input that is a value of another tape.
    pub fn push_many<F>(
        &self,
        inputs: &[&Value],
        outputs: Vec<Tensor>,
        backward: F,
    ) -> Result<Vec<Value>>
    where
        F: FnOnce(Gradients) -> Result<Gradients> + 'static,
    {
        self.check(inputs)?;
        self.note_reading(inputs);
        if inputs.iter().all(|input| input.slot.is_none()) {
            return Ok(outputs.into_iter().map(|tensor| self.constant(tensor)).collect());
        }
        let backward: Backward = Box::new(move |gradients, _| backward(gradients));
        Ok(self.add_operation(inputs, outputs, backward))
    }

    /// Runs `segment`; on a tape that is checkpointing without storing its activations, and once more in the
    /// backward pass. It must give the same values both times.
    ///
    /// # Errors
    /// For an input that is a value of another tape, and what `segment` gives. It is run on tapes of its own: of this
    /// one's values it may read `inputs` alone.
    pub fn segment(&self, inputs: &[&Value], segment: Segment) -> Result<Vec<Value>> {
        if !self.checkpointing {
            return segment(self, &inputs.iter().map(|&input| input.clone()).collect::<Vec<_>>());
        }
        self.check(inputs)?;
        self.note_reading(inputs);
        let detached: Vec<Value> =
            inputs.iter().map(|input| self.constant(input.tensor.clone())).collect();
        let (checkpointing, dropout_seed) = (self.checkpointing, self.dropout_seed);
        let probe = Tape { checkpointing, dropout_seed, ..Tape::inference() };
        if self.training {
            probe.kept.replace(Some(VecDeque::new()));
            probe.skippable.replace(Skippable::Tracing(Vec::new()));
        }
        let outputs: Vec<Tensor> =
            segment(&probe, &detached)?.into_iter().map(Value::into_tensor).collect();
        self.touched.set(self.touched.get() || probe.touched.get());
        let needed = probe.touched.get() || inputs.iter().any(|input| input.slot.is_some());
        if !self.training || !needed {
            return Ok(outputs.into_iter().map(|tensor| self.constant(tensor)).collect());
        }
        let needs: Vec<bool> = inputs.iter().map(|input| input.slot.is_some()).collect();
        let (kept, skipped) = (probe.kept.take(), probe.skippable.take().skipped());
        let stored = {
            let (given, kept) =
                (detached.iter().map(Value::tensor), kept.iter().flatten().flatten());
            Stored::new(given.chain(kept).map(|tensor| (tensor, true)), self.offload.as_ref())?
        };
        drop((detached, kept));
        let backward = move |gradients: Gradients, sink: &mut dyn GradientSink| {
            let mut given = stored.tensors()?;
            drop(stored);
            let mut kept = given.split_off(needs.len()).into_iter();
            let mut pairs = VecDeque::new();
            while let (Some(first), Some(second)) = (kept.next(), kept.next()) {
                pairs.push_back([first, second]);
            }
            let tape = Tape {
                checkpointing,
                dropout_seed,
                replaying: true,
                kept: RefCell::new(Some(pairs)),
                skippable: RefCell::new(Skippable::Skipping(skipped, 0)),
                ..Tape::training()
            };
            let leaf = |(tensor, &needed)| match needed {
                true => tape.input(tensor),
                false => tape.constant(tensor),
            };
            let leaves: Vec<Value> = given.into_iter().zip(&needs).map(leaf).collect();
            let outputs = segment(&tape, &leaves)?;
            tape.check(&outputs.iter().collect::<Vec<_>>())?;
            let mut seeds: Vec<(Slot, Tensor)> = Vec::with_capacity(outputs.len());
            for (output, gradient) in outputs.iter().zip(gradients) {
                if let (Some(slot), Some(gradient)) = (output.slot, gradient) {
                    seeds.push((slot, gradient));
                }
            }
            drop(outputs);
            let kept = leaves.iter().filter(|leaf| leaf.slot.is_some()).count();
            let mut found = tape.walk(seeds, sink, kept)?;
            Ok(leaves
                .iter()
                .map(|leaf| leaf.slot.and_then(|slot| found[slot.node][slot.output].take()))
                .collect())
        };
        Ok(self.add_operation(inputs, outputs, Box::new(backward)))
    }

    /// Walks back from the scalar `root`, whose own gradient is `seed`, and hands every
    /// parameter's gradient to `sink`. Consumes the tape.
    ///
    /// # Errors
    /// For a `root` that is no scalar, that no parameter feeds or that is a value of another tape, and when an operation
    /// fails.
    pub fn backward(self, root: &Value, seed: f64, sink: &mut dyn GradientSink) -> Result<()> {
        if root.tensor.elem_count() != 1 {
            return Err(candle_core::Error::msg(format!(
                "backward starts from a scalar, got {:?}",
                root.tensor.shape()
            ))
            .into());
        }
        let seed = Tensor::full(seed, root.shape(), &Device::Cpu)?.to_dtype(root.tensor.dtype())?;
        self.backward_from(root, seed.to_device(root.tensor.device())?, sink)
    }

    /// Like [`Self::backward`], from a `root` of any shape, whose own `gradient` has its shape and dtype.
    ///
    /// # Errors
    /// For a `gradient` of another shape or dtype, and as [`Self::backward`].
    pub fn backward_from(
        self,
        root: &Value,
        gradient: Tensor,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        if gradient.shape() != root.shape() || gradient.dtype() != root.tensor.dtype() {
            return Err(candle_core::Error::msg(format!(
                "backward from {:?} in {:?} got a gradient {:?} in {:?}",
                root.shape(),
                root.tensor.dtype(),
                gradient.shape(),
                gradient.dtype()
            ))
            .into());
        }
        let Some(slot) = root.slot else {
            return Err(
                candle_core::Error::msg("backward from a value that no parameter feeds").into()
            );
        };
        self.check(&[root])?;
        let mut pending = Pending::new(sink);
        self.walk(vec![(slot, gradient)], &mut pending, 0)?;
        pending.hand_over()
    }

    /// An input of a recomputed segment: a leaf whose gradient stays with the tape.
    fn input(&self, tensor: Tensor) -> Value {
        let backward: Backward = Box::new(|_, _| Ok(Vec::new()));
        let slot = self.add_node(Node::Operation { inputs: Vec::new(), outputs: 1, backward });
        Value::new(tensor, Some(slot))
    }

    /// That none of these values has a node of another tape, whose places here are other nodes' or nobody's.
    fn check(&self, values: &[&Value]) -> Result<()> {
        let is_own = |value: &&Value| value.slot.is_none_or(|slot| slot.tape == self.id);
        if values.iter().all(is_own) {
            return Ok(());
        }
        Err(candle_core::Error::msg("a value of another tape than the one it is used with").into())
    }

    fn add_node(&self, node: Node) -> Slot {
        let mut nodes = self.nodes.borrow_mut();
        nodes.push(node);
        Slot { tape: self.id, node: nodes.len() - 1, output: 0 }
    }

    fn add_operation(
        &self,
        inputs: &[&Value],
        outputs: Vec<Tensor>,
        backward: Backward,
    ) -> Vec<Value> {
        let slot = self.add_node(Node::Operation {
            inputs: inputs.iter().map(|input| input.slot).collect(),
            outputs: outputs.len(),
            backward,
        });
        outputs
            .into_iter()
            .enumerate()
            .map(|(output, tensor)| Value::new(tensor, Some(Slot { output, ..slot })))
            .collect()
    }

    /// Runs the nodes from the last to the first. The gradients of the first `kept` nodes, the
    /// inputs of a recomputed segment, are returned instead of being spent.
    fn walk(
        self,
        seeds: Vec<(Slot, Tensor)>,
        sink: &mut dyn GradientSink,
        kept: usize,
    ) -> Result<Vec<Gradients>> {
        let mut nodes = self.nodes.into_inner();
        let mut gradients: Vec<Gradients> = nodes
            .iter()
            .map(|node| match node {
                Node::Parameter(_) => vec![None],
                Node::Operation { outputs, .. } => vec![None; *outputs],
            })
            .collect();
        for (slot, gradient) in seeds {
            accumulate(&mut gradients, slot, gradient)?;
        }
        while nodes.len() > kept {
            let (Some(node), Some(mut gradient)) = (nodes.pop(), gradients.pop()) else { break };
            if gradient.iter().all(Option::is_none) {
                continue;
            }
            match node {
                Node::Parameter(id) => {
                    if let Some(gradient) = gradient.pop().flatten() {
                        sink.accept(id, gradient)?;
                    }
                }
                Node::Operation { inputs, backward, .. } => {
                    let found = backward(gradient, sink)?;
                    if found.len() != inputs.len() {
                        return Err(candle_core::Error::msg(format!(
                            "an operation of {} inputs gave {} gradients",
                            inputs.len(),
                            found.len()
                        ))
                        .into());
                    }
                    for (slot, gradient) in inputs.into_iter().zip(found) {
                        if let (Some(slot), Some(gradient)) = (slot, gradient) {
                            accumulate(&mut gradients, slot, gradient)?;
                        }
                    }
                }
            }
        }
        Ok(gradients)
    }
}

/// Hands neighbouring small gradients over together, which takes their memory for so long.
struct Pending<'a> {
    sink: &'a mut dyn GradientSink,
    gradients: Vec<(ParameterId, Tensor)>,
    bytes: usize,
}

impl<'a> Pending<'a> {
    const MOST: usize = 32;
    const MOST_BYTES: usize = 8 << 20;

    fn new(sink: &'a mut dyn GradientSink) -> Self {
        Self { sink, gradients: Vec::new(), bytes: 0 }
    }

    fn hand_over(&mut self) -> Result<()> {
        self.bytes = 0;
        match std::mem::take(&mut self.gradients) {
            none if none.is_empty() => Ok(()),
            gradients => self.sink.accept_all(gradients),
        }
    }
}

impl GradientSink for Pending<'_> {
    fn accept(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        let bytes = gradient.elem_count() * gradient.dtype().size_in_bytes();
        if self.gradients.len() == Self::MOST || self.bytes + bytes > Self::MOST_BYTES {
            self.hand_over()?;
        }
        self.bytes += bytes;
        self.gradients.push((id, gradient));
        match bytes < Self::MOST_BYTES {
            true => Ok(()),
            false => self.hand_over(),
        }
    }

    fn accept_rows(&mut self, id: ParameterId, gradient: TableGradient) -> Result<()> {
        self.hand_over()?;
        self.sink.accept_rows(id, gradient)
    }
}

fn accumulate(gradients: &mut [Gradients], slot: Slot, gradient: Tensor) -> Result<()> {
    let held = &mut gradients[slot.node][slot.output];
    *held = Some(match held.take() {
        None => gradient,
        // Out of place: the same tensor may be on its way to other inputs.
        Some(first) => arithmetic::add(&first, &gradient)?,
    });
    Ok(())
}
