//! Values, nodes and the walk back through them.

use crate::Result;
use candle_core::{Device, Shape, Tensor};
use metal_candle_kernels::{arithmetic, devices};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// Names one trainable tensor in the parameter store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParameterId(pub usize);

/// A tensor of the model: frozen, or a view of a trainable parameter.
#[derive(Clone, Debug)]
pub struct Weight {
    tensor: Tensor,
    parameter: Option<ParameterId>,
}

impl Weight {
    /// A tensor that is never trained.
    pub fn frozen(tensor: Tensor) -> Self {
        Self { tensor, parameter: None }
    }

    /// A view of the trainable parameter `id`.
    pub fn trainable(tensor: Tensor, id: ParameterId) -> Self {
        Self { tensor, parameter: Some(id) }
    }

    /// The tensor as it is now.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The parameter behind it, if it is trained.
    pub fn parameter(&self) -> Option<ParameterId> {
        self.parameter
    }
}

/// Receives the gradient of a parameter as soon as it is known, possibly in several parts that
/// have to be added.
pub trait GradientSink {
    /// Takes over one contribution to the gradient of `id`.
    fn accept(&mut self, id: ParameterId, gradient: Tensor) -> Result<()>;
}

impl<F: FnMut(ParameterId, Tensor) -> Result<()>> GradientSink for F {
    fn accept(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        self(id, gradient)
    }
}

/// One output of one node.
#[derive(Clone, Copy, Debug)]
struct Slot {
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
}

/// How a value that costs little is made again from tensors that a backward pass keeps anyway.
#[derive(Clone)]
pub(super) struct Recipe(Arc<dyn Fn() -> Result<Tensor>>);

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

impl Value {
    /// The tensor itself.
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
        self.recipe = Some(Recipe(Arc::new(make)));
        self
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

/// Records operations for one forward and one backward pass.
pub struct Tape {
    nodes: RefCell<Vec<Node>>,
    recording: bool,
    /// Set while a segment is run again for its gradients: nothing reads its results.
    replaying: bool,
    /// Set when a trainable weight was read, also while nothing is recorded.
    touched: Cell<bool>,
    /// What a segment keeps for its second run, in the order of its operations; `None` where there will
    /// be none.
    kept: RefCell<Option<VecDeque<[Tensor; 2]>>>,
}

impl Tape {
    /// A tape that records whatever depends on a trainable weight.
    pub fn recording() -> Self {
        Self {
            nodes: RefCell::default(),
            recording: true,
            replaying: false,
            touched: Cell::new(false),
            kept: RefCell::new(None),
        }
    }

    /// A tape that records nothing, for evaluation and generation.
    pub fn inference() -> Self {
        Self { recording: false, ..Self::recording() }
    }

    /// Whether this tape records what depends on a trainable weight.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// The value for a backward pass. On a GPU, where memory is what bounds the batch, it is made again
    /// rather than kept if there is a way; not in a segment that is run again, as its backward pass comes
    /// next.
    pub(super) fn save(&self, value: &Value) -> Saved {
        match &value.recipe {
            Some(recipe) if devices::computes_on_gpu(&value.tensor) && !self.replaying => {
                Saved::MadeAgain(recipe.clone())
            }
            _ => Saved::Kept(value.tensor.clone()),
        }
    }

    /// Whether a segment is run again for its gradients. Its results are not read then, so an operation
    /// that gives nothing but them may leave them out.
    pub fn is_replaying(&self) -> bool {
        self.replaying
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

    /// How many nodes are recorded.
    pub fn len(&self) -> usize {
        self.nodes.borrow().len()
    }

    /// Whether nothing is recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A value that gets no gradient.
    pub fn constant(&self, tensor: Tensor) -> Value {
        Value { tensor, slot: None, recipe: None }
    }

    /// A weight of the model as a value; a trainable one becomes a leaf.
    pub fn weight(&self, weight: &Weight) -> Value {
        let slot = weight.parameter.and_then(|id| {
            self.touched.set(true);
            self.recording.then(|| self.push(Node::Parameter(id)))
        });
        Value { tensor: weight.tensor.clone(), slot, recipe: None }
    }

    /// Records an operation with one output. `backward` turns the gradient of the output into one
    /// gradient for each of `inputs`, in order; those of inputs that need none are dropped, so it
    /// should not compute them.
    pub fn record<F>(&self, inputs: &[&Value], output: Tensor, backward: F) -> Value
    where
        F: FnOnce(Tensor) -> Result<Gradients> + 'static,
    {
        if inputs.iter().all(|input| input.slot.is_none()) {
            return self.constant(output);
        }
        let slot = self.push(Node::Operation {
            inputs: inputs.iter().map(|input| input.slot).collect(),
            outputs: 1,
            backward: Box::new(move |mut gradients, _| match gradients.pop().flatten() {
                Some(gradient) => backward(gradient),
                None => Ok(Vec::new()),
            }),
        });
        Value { tensor: output, slot: Some(slot), recipe: None }
    }

    /// Records an operation with several outputs. The gradient of an output that nothing used is
    /// `None`.
    pub fn record_many<F>(&self, inputs: &[&Value], outputs: Vec<Tensor>, backward: F) -> Vec<Value>
    where
        F: FnOnce(Gradients) -> Result<Gradients> + 'static,
    {
        if inputs.iter().all(|input| input.slot.is_none()) {
            return outputs.into_iter().map(|tensor| self.constant(tensor)).collect();
        }
        self.push_many(inputs, outputs, Box::new(move |gradients, _| backward(gradients)))
    }

    /// Runs `segment` without storing its activations, but for what attention gives, and runs it again in
    /// the backward pass. It must give the same values both times.
    pub fn checkpoint(&self, inputs: &[&Value], segment: Segment) -> Result<Vec<Value>> {
        let detached: Vec<Value> =
            inputs.iter().map(|input| self.constant(input.tensor.clone())).collect();
        let probe = Tape::inference();
        if self.recording {
            probe.kept.replace(Some(VecDeque::new()));
        }
        let outputs: Vec<Tensor> =
            segment(&probe, &detached)?.into_iter().map(Value::into_tensor).collect();
        self.touched.set(self.touched.get() || probe.touched.get());
        let needed = probe.touched.get() || inputs.iter().any(|input| input.slot.is_some());
        if !self.recording || !needed {
            return Ok(outputs.into_iter().map(|tensor| self.constant(tensor)).collect());
        }
        let needs: Vec<bool> = inputs.iter().map(|input| input.slot.is_some()).collect();
        let kept = probe.kept.take();
        let backward = move |gradients: Gradients, sink: &mut dyn GradientSink| {
            let tape = Tape { replaying: true, kept: RefCell::new(kept), ..Tape::recording() };
            let leaves: Vec<Value> = detached
                .into_iter()
                .zip(&needs)
                .map(|(value, &needed)| if needed { tape.input(value.tensor) } else { value })
                .collect();
            let outputs = segment(&tape, &leaves)?;
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
                .map(|leaf| leaf.slot.and_then(|slot| found.get_mut(slot.node)?.pop().flatten()))
                .collect())
        };
        Ok(self.push_many(inputs, outputs, Box::new(backward)))
    }

    /// Walks back from the scalar `root`, whose own gradient is `seed`, and hands every
    /// parameter's gradient to `sink`. Consumes the tape.
    pub fn backward(self, root: &Value, seed: f64, sink: &mut dyn GradientSink) -> Result<()> {
        if root.tensor.elem_count() != 1 {
            return Err(candle_core::Error::msg(format!(
                "backward starts from a scalar, got {:?}",
                root.tensor.shape()
            ))
            .into());
        }
        let Some(slot) = root.slot else {
            return Err(candle_core::Error::msg(
                "backward from a value that no trainable parameter feeds",
            )
            .into());
        };
        let seed = Tensor::full(seed, root.shape(), &Device::Cpu)?.to_dtype(root.tensor.dtype())?;
        let gradient = seed.to_device(root.tensor.device())?;
        self.walk(vec![(slot, gradient)], sink, 0)?;
        Ok(())
    }

    /// An input of a recomputed segment: a leaf whose gradient stays with the tape.
    fn input(&self, tensor: Tensor) -> Value {
        let backward: Backward = Box::new(|_, _| Ok(Vec::new()));
        let slot = self.push(Node::Operation { inputs: Vec::new(), outputs: 1, backward });
        Value { tensor, slot: Some(slot), recipe: None }
    }

    fn push(&self, node: Node) -> Slot {
        let mut nodes = self.nodes.borrow_mut();
        nodes.push(node);
        Slot { node: nodes.len() - 1, output: 0 }
    }

    fn push_many(&self, inputs: &[&Value], outputs: Vec<Tensor>, backward: Backward) -> Vec<Value> {
        let Slot { node, .. } = self.push(Node::Operation {
            inputs: inputs.iter().map(|input| input.slot).collect(),
            outputs: outputs.len(),
            backward,
        });
        outputs
            .into_iter()
            .enumerate()
            .map(|(output, tensor)| Value {
                tensor,
                slot: Some(Slot { node, output }),
                recipe: None,
            })
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
                    for (slot, gradient) in inputs.into_iter().zip(backward(gradient, sink)?) {
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

fn accumulate(gradients: &mut [Gradients], slot: Slot, gradient: Tensor) -> Result<()> {
    let held = &mut gradients[slot.node][slot.output];
    *held = Some(match held.take() {
        None => gradient,
        // Out of place: the same tensor may be on its way to other inputs.
        Some(first) => arithmetic::add(&first, &gradient)?,
    });
    Ok(())
}
