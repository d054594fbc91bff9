use super::*;
use crate::quantized::{Format, Quantized, Weight, quantize};
use crate::testing::*;

/// Of 5 tokens 2 of 4 experts each.
fn logits() -> Tensor {
    let rows = [
        [0.5, 2.0, -1.0, 1.5],
        [1.0, 1.0, 1.0, 1.0],
        [-3.0, 0.0, 4.0, 3.5],
        [0.1, -0.2, 0.3, 0.0],
        [9.0, -9.0, 8.0, 0.0],
    ];
    Tensor::new(&rows, &Device::Cpu).unwrap()
}

fn places<const N: usize>(numbers: &[[u32; 2]; N]) -> Tensor {
    Tensor::new(numbers, &Device::Cpu).unwrap()
}

const PLACES: [[u32; 2]; 5] = [[3, 0], [7, 2], [9, 1], [4, 8], [6, 5]];

#[test]
fn the_largest_are_chosen_and_the_first_of_equals() {
    for normalized in [true, false] {
        let routes = Routes::new(&logits(), 2, normalized).unwrap();
        assert_eq!(routes.chosen, [1, 3, 0, 1, 2, 3, 2, 0, 0, 2]);
        let weights = values(&routes.weights(DType::F64, &Device::Cpu).unwrap());
        for (token, logits) in logits().to_vec2::<f64>().unwrap().iter().enumerate() {
            let chosen = &routes.chosen[2 * token..][..2];
            let of = |experts: &[usize]| experts.iter().map(|it| logits[*it].exp()).sum::<f64>();
            let sum = if normalized { of(chosen) } else { of(&[0, 1, 2, 3]) };
            for (found, expert) in weights[2 * token..].iter().zip(chosen) {
                assert!((found - of(&[*expert]) / sum).abs() < 1e-14);
            }
        }
    }
    let all = Routes::new(&logits(), 4, true).unwrap();
    assert_eq!(all.chosen[..8], [1, 3, 0, 2, 0, 1, 2, 3]);
    let single = logits().to_dtype(DType::F32).unwrap();
    let routes = Routes::new(&strided(&single), 2, true).unwrap();
    assert_eq!(routes.weights(DType::BF16, &Device::Cpu).unwrap().dtype(), DType::F32);
    assert_eq!(routes.chosen, Routes::new(&logits(), 2, true).unwrap().chosen);
}

#[test]
fn rows_lie_by_expert_and_in_the_order_of_tokens() {
    let routes = Routes::new(&logits(), 2, true).unwrap();
    let Dispatch { tokens, places, experts } = routes.dispatch();
    assert_eq!(experts, [(0, 3), (1, 2), (2, 3), (3, 2)]);
    assert_eq!(tokens, [1, 3, 4, 0, 1, 2, 3, 4, 0, 2]);
    assert_eq!(places, [3, 8, 0, 4, 5, 9, 6, 1, 2, 7]);
    let one = Routes::new(&logits().narrow(0, 4, 1).unwrap(), 1, true).unwrap().dispatch();
    assert_eq!(one, Dispatch { tokens: vec![0], places: vec![0], experts: vec![(0, 1)] });
    let none = Routes::new(&logits().narrow(0, 0, 0).unwrap(), 2, true).unwrap();
    assert_eq!((none.tokens(), none.dispatch().experts), (0, Vec::new()));
}

#[test]
fn the_gradient_of_logits_matches_finite_differences() {
    // Far from where another expert is chosen.
    let logits = (random(&[7, 5], 1) * 3.0).unwrap();
    let dweights = random(&[7, 2], 2);
    for normalized in [true, false] {
        let weights =
            |logits: &Tensor| Routes::new(logits, 2, normalized)?.weights(DType::F64, &Device::Cpu);
        let routes = Routes::new(&logits, 2, normalized).unwrap();
        let dlogits = routes.backward(&dweights).unwrap();
        assert_gradient(&logits, &dlogits, |it| inner_product(&weights(it)?, &dweights));
        let single = routes.backward(&dweights.to_dtype(DType::F32).unwrap()).unwrap();
        assert_eq!(single.dtype(), DType::F32);
        assert_close(&single, &dlogits, 1e-6);
    }
}

#[test]
fn sums_match_their_definition_in_every_dtype() {
    let (y, weights) = (random(&[10, 33], 1), random(&[5, 2], 2));
    let rows = y.to_vec2::<f64>().unwrap();
    let of = |weights: &Tensor| {
        let weights = weights.to_vec2::<f64>().unwrap();
        let sum = |token: usize, column: usize| {
            let choices = weights[token].iter().zip(PLACES[token]);
            choices.map(|(w, place)| w * rows[place as usize][column]).sum::<f64>()
        };
        let sums = (0..5).flat_map(|token| (0..33).map(move |column| (token, column)));
        let sums = sums.map(|(token, column)| sum(token, column)).collect::<Vec<_>>();
        Tensor::from_vec(sums, (5, 33), &Device::Cpu).unwrap()
    };
    let found = combine(&y, &weights, &places(&PLACES)).unwrap();
    assert_close(&found, &of(&weights), 1e-14);
    for (dtype, tolerance) in PRECISIONS {
        let (low, single) = (y.to_dtype(dtype).unwrap(), weights.to_dtype(DType::F32).unwrap());
        let exact =
            combine(&rounded(&y, dtype), &rounded(&weights, DType::F32), &places(&PLACES)).unwrap();
        let found = combine(&strided(&low), &strided(&single), &strided(&places(&PLACES))).unwrap();
        assert_eq!(found.dtype(), dtype);
        assert_close(&found, &exact, tolerance);
    }
}

#[test]
fn gradients_of_sums_match_finite_differences() {
    for columns in [1, 7, 33] {
        let (y, weights) = (random(&[10, columns], 1), random(&[5, 2], 2));
        let dout = random(&[5, columns], 3);
        let places = places(&PLACES);
        let Gradients { dy, dweights } = combine_backward(&y, &weights, &places, &dout).unwrap();
        let loss =
            |y: &Tensor, weights: &Tensor| inner_product(&combine(y, weights, &places)?, &dout);
        assert_gradient(&y, &dy, |y| loss(y, &weights));
        assert_gradient(&weights, &dweights, |weights| loss(&y, weights));
    }
    for (dtype, tolerance) in PRECISIONS {
        let (y, weights) = (random(&[10, 70], 1), random(&[5, 2], 2));
        let dout = random(&[5, 70], 3);
        let (exact_y, exact_weights) = (rounded(&y, dtype), rounded(&weights, DType::F32));
        let exact =
            combine_backward(&exact_y, &exact_weights, &places(&PLACES), &rounded(&dout, dtype));
        let exact = exact.unwrap();
        let low = |it: &Tensor| strided(&it.to_dtype(dtype).unwrap());
        let weights = strided(&weights.to_dtype(DType::F32).unwrap());
        let found = combine_backward(&low(&y), &weights, &places(&PLACES), &low(&dout)).unwrap();
        assert_eq!((found.dy.dtype(), found.dweights.dtype()), (dtype, DType::F32));
        assert_close(&found.dy, &exact.dy, tolerance);
        assert_close(&found.dweights, &exact.dweights, 3e-6);
    }
}

#[test]
fn threads_do_not_change_bits() {
    let tokens = 700;
    let logits = random(&[tokens, 16], 1);
    let routes = Routes::new(&logits, 3, true).unwrap();
    let places = Tensor::from_vec(routes.dispatch().places, (tokens, 3), &Device::Cpu).unwrap();
    let weights = routes.weights(DType::F32, &Device::Cpu).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let low = |shape: &[usize], seed| random(shape, seed).to_dtype(dtype).unwrap();
        let (y, dout) = (low(&[3 * tokens, 65], 2), low(&[tokens, 65], 3));
        assert_independent_of_threads(|| {
            let found = combine_backward(&y, &weights, &places, &dout).unwrap();
            vec![combine(&y, &weights, &places).unwrap(), found.dy, found.dweights]
        });
    }
}

#[test]
fn empty_and_wrong_arguments_are_handled() {
    let weights = random(&[5, 2], 1);
    let none = Tensor::zeros((0, 2), DType::U32, &Device::Cpu).unwrap();
    let empty = random(&[0, 2], 1);
    assert_eq!(combine(&random(&[0, 7], 1), &empty, &none).unwrap().dims(), [0, 7]);
    let found = combine_backward(&random(&[0, 7], 1), &empty, &none, &random(&[0, 7], 2)).unwrap();
    assert_eq!((found.dy.dims(), found.dweights.dims()), (&[0, 7][..], &[0, 2][..]));
    let y = random(&[10, 0], 1);
    assert_eq!(combine(&y, &weights, &places(&PLACES)).unwrap().dims(), [5, 0]);
    let found = combine_backward(&y, &weights, &places(&PLACES), &random(&[5, 0], 1)).unwrap();
    assert_eq!(values(&found.dweights), [0.0; 10]);

    let y = random(&[10, 7], 1);
    let mut wrong = PLACES;
    wrong[2][1] = 10;
    let error = message(combine(&y, &weights, &places(&wrong)));
    assert!(error.contains("place 10 is outside of y, expected less than 10"), "{error}");
    wrong[2][1] = 9;
    let dout = random(&[5, 7], 1);
    let error = message(combine_backward(&y, &weights, &places(&wrong), &dout));
    assert!(error.contains("row 9 is the choice of two tokens"), "{error}");
    let more = random(&[11, 7], 1);
    let error = message(combine_backward(&more, &weights, &places(&PLACES), &dout));
    assert!(error.contains("y has 11 rows"), "{error}");
    let single = weights.to_dtype(DType::F32).unwrap();
    let error = message(combine(&y, &single, &places(&PLACES)));
    assert!(error.contains("weights is F32, expected F64"), "{error}");
    for active in [0, 5] {
        let error = message(Routes::new(&logits(), active, true));
        assert!(error.contains(&format!("{active} experts, expected 1 to 4")), "{error}");
    }
    let error = message(Routes::new(&logits(), 2, true).unwrap().backward(&random(&[5, 3], 1)));
    assert!(error.contains("dweights has shape [5, 3], expected [5, 2]"), "{error}");
}

#[test]
fn a_logit_that_is_no_number_shows() {
    let logits = Tensor::new(&[[0.0, f64::NAN, 1.0], [0.0, f64::INFINITY, 1.0]], &Device::Cpu);
    let routes = Routes::new(&logits.unwrap(), 2, true).unwrap();
    assert!(routes.weights.iter().all(|weight| weight.is_nan()), "{:?}", routes.weights);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_agrees_with_the_cpu() {
    let device = cuda();
    for (tokens, active, columns) in [(1, 8, 2048), (5, 2, 33), (300, 4, 72), (2, 1, 1)] {
        let logits = random(&[tokens, 16], 1).to_dtype(DType::F32).unwrap();
        let routes = Routes::new(&there(&logits, &device), active, true).unwrap();
        assert_eq!(routes.chosen, Routes::new(&logits, active, true).unwrap().chosen);
        let shape = (tokens, active);
        let places = Tensor::from_vec(routes.dispatch().places, shape, &Device::Cpu).unwrap();
        let weights = routes.weights(DType::F32, &Device::Cpu).unwrap();
        for (dtype, tolerance) in PRECISIONS {
            let low = |shape: &[usize], seed| random(shape, seed).to_dtype(dtype).unwrap();
            let (y, dout) = (low(&[tokens * active, columns], 2), low(&[tokens, columns], 3));
            let expected = combine(&y, &weights, &places).unwrap();
            let gradients = combine_backward(&y, &weights, &places, &dout).unwrap();
            for view in [|tensor: &Tensor| tensor.clone(), strided] {
                let on_gpu = |tensor: &Tensor| view(&there(tensor, &device));
                let (y, dout) = (on_gpu(&y), on_gpu(&dout));
                let (weights, places) = (on_gpu(&weights), on_gpu(&places));
                let found = combine(&y, &weights, &places).unwrap();
                assert_close(&here(&found), &expected, tolerance);
                let found = combine_backward(&y, &weights, &places, &dout).unwrap();
                assert_close(&here(&found.dy), &gradients.dy, tolerance);
                assert_close(&here(&found.dweights), &gradients.dweights, 3e-6);
            }
        }
    }
    let low = |shape: &[usize]| there(&random(shape, 1).to_dtype(DType::F32).unwrap(), &device);
    let outside = places(&[[0, 1], [2, 9]]);
    let found = combine(&low(&[4, 8]), &low(&[2, 2]), &there(&outside, &device)).unwrap();
    let found = values(&here(&found));
    assert!(found[..8].iter().all(|it| it.is_finite()) && found[8..].iter().all(|it| it.is_nan()));
}

/// Rows of experts: few, many, and as many as a few are at most.
const ROWS: [usize; 6] = [1, 4, 19, 2, 5, 3];

fn experts<'a, T>(weights: &'a [[T; 2]]) -> Vec<grouped::Expert<'a>>
where
    Weight<'a>: From<&'a T>,
{
    let expert = |(rows, weights): (usize, &'a [T; 2])| {
        let layers = weights.each_ref().map(|it| Weight::from(it).into()).to_vec();
        grouped::Expert { rows, layers }
    };
    ROWS.into_iter().zip(weights).map(expert).collect()
}

/// Each row's product with its expert's weight, by Candle.
fn by_rows(x: &Tensor, weights: &[[Tensor; 2]], layer: usize) -> Tensor {
    let mut start = 0;
    let parts = ROWS.iter().zip(weights).map(|(rows, weights)| {
        start += rows;
        let part = x.narrow(0, start - rows, *rows).unwrap().contiguous().unwrap();
        part.matmul(&weights[layer].t().unwrap()).unwrap()
    });
    Tensor::cat(&parts.collect::<Vec<_>>(), 0).unwrap()
}

fn weights_of(inner: usize, dtype: DType) -> Vec<[Tensor; 2]> {
    let weight = |seed| random(&[37, inner], seed).to_dtype(dtype).unwrap();
    (0..ROWS.len() as u64).map(|seed| [weight(10 + seed), weight(20 + seed)]).collect()
}

/// A bias for each layer but one.
fn with_biases<'a>(
    mut experts: Vec<grouped::Expert<'a>>,
    biases: &'a [Tensor],
) -> Vec<grouped::Expert<'a>> {
    let layers = experts.iter_mut().flat_map(|expert| &mut expert.layers).skip(1);
    for (layer, bias) in layers.zip(&biases[1..]) {
        layer.bias = Some(bias);
    }
    experts
}

fn biases_of(count: usize, outer: usize, dtype: DType) -> Vec<Tensor> {
    (0..count as u64).map(|seed| random(&[outer], 40 + seed).to_dtype(dtype).unwrap()).collect()
}

/// Each row's bias.
fn biases_by_rows(biases: &[Tensor], layer: usize) -> Tensor {
    let bias = |expert: usize| match 2 * expert + layer {
        0 => (&biases[0] * 0.0).unwrap(),
        index => biases[index].clone(),
    };
    let parts = ROWS.iter().enumerate().map(|(expert, rows)| {
        let bias = bias(expert).unsqueeze(0).unwrap();
        bias.broadcast_as((*rows, bias.elem_count())).unwrap()
    });
    Tensor::cat(&parts.collect::<Vec<_>>(), 0).unwrap()
}

#[test]
fn grouped_products_are_those_of_each_expert() {
    let total = ROWS.iter().sum::<usize>();
    for inner in [5, 64, 130] {
        let (x, exact) = (random(&[total, inner], 1), weights_of(inner, DType::F64));
        for (layer, y) in grouped::forward(&x, &experts(&exact)).unwrap().iter().enumerate() {
            assert_close(y, &by_rows(&x, &exact, layer), 1e-13);
        }
        let biases = biases_of(2 * ROWS.len(), 37, DType::F64);
        let biased = with_biases(experts(&exact), &biases);
        for (layer, y) in grouped::forward(&x, &biased).unwrap().iter().enumerate() {
            let expected = (by_rows(&x, &exact, layer) + biases_by_rows(&biases, layer)).unwrap();
            assert_close(y, &expected, 1e-13);
        }
        for (dtype, tolerance) in PRECISIONS {
            let low = strided(&x.to_dtype(dtype).unwrap());
            let weights = weights_of(inner, dtype);
            let wide: Vec<[Tensor; 2]> =
                exact.iter().map(|pair| pair.each_ref().map(|it| rounded(it, dtype))).collect();
            let of_both = [false, true].map(|invariant| {
                crate::batch_invariance::within(invariant, || {
                    grouped::forward(&low, &experts(&weights)).unwrap()
                })
            });
            for found in of_both {
                for (layer, y) in found.iter().enumerate() {
                    assert_eq!((y.dtype(), y.dims()), (dtype, &[total, 37][..]));
                    assert_close(y, &by_rows(&rounded(&x, dtype), &wide, layer), tolerance);
                }
            }
            let biases = biases_of(2 * ROWS.len(), 37, dtype);
            let wide_biases: Vec<_> =
                biases.iter().map(|bias| bias.to_dtype(DType::F64).unwrap()).collect();
            let biased = with_biases(experts(&weights), &biases);
            for invariant in [false, true] {
                let found = crate::batch_invariance::within(invariant, || {
                    grouped::forward(&low, &biased).unwrap()
                });
                for (layer, y) in found.iter().enumerate() {
                    let products = by_rows(&rounded(&x, dtype), &wide, layer);
                    let expected = (products + biases_by_rows(&wide_biases, layer)).unwrap();
                    assert_close(y, &expected, tolerance);
                }
            }
        }
    }
}

#[test]
fn grouped_products_by_packed_weights_are_those_of_their_numbers() {
    let total = ROWS.iter().sum::<usize>();
    let x = random(&[total, 256], 1);
    for format in
        [Format::Nf4 { block: 64, nested: true }, Format::Q4K, Format::Q8_0, Format::Int8Rows]
    {
        let packed: Vec<[Quantized; 2]> = weights_of(256, DType::F32)
            .iter()
            .map(|pair| pair.each_ref().map(|it| quantize(it, format).unwrap()))
            .collect();
        let dense: Vec<[Tensor; 2]> = packed
            .iter()
            .map(|pair| pair.each_ref().map(|it| it.dequantize(DType::F32).unwrap()))
            .collect();
        for (dtype, tolerance) in PRECISIONS {
            let x = x.to_dtype(dtype).unwrap();
            let groups = experts(&packed);
            let found = grouped::forward(&x, &groups).unwrap();
            let expected = grouped::forward(&x, &experts(&dense)).unwrap();
            let dys: Vec<_> = found.iter().map(Some).collect();
            let dx = grouped::backward_input(&dys, &groups).unwrap();
            assert_close(
                &dx,
                &grouped::backward_input(&dys, &experts(&dense)).unwrap(),
                4.0 * tolerance,
            );
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(found, expected, 2.0 * tolerance);
            }
        }
    }
}

#[test]
fn the_gradient_of_grouped_rows_matches_finite_differences() {
    let total = ROWS.iter().sum::<usize>();
    let (x, weights) = (random(&[total, 7], 1), weights_of(7, DType::F64));
    let dys = [random(&[total, 37], 2), random(&[total, 37], 3)];
    for used in [[true, true], [false, true], [true, false]] {
        let given: Vec<_> = dys.iter().zip(used).map(|(dy, used)| used.then_some(dy)).collect();
        let dx = grouped::backward_input(&given, &experts(&weights)).unwrap();
        assert_gradient(&x, &dx, |x| {
            let ys = grouped::forward(x, &experts(&weights))?;
            let products = ys.iter().zip(&given).filter_map(|(y, dy)| Some((y, (*dy)?)));
            products.map(|(y, dy)| inner_product(y, dy)).sum()
        });
    }
}

#[test]
fn threads_do_not_change_the_bits_of_grouped_products() {
    let total = ROWS.iter().sum::<usize>();
    for dtype in [DType::F32, DType::BF16] {
        let (x, weights) =
            (random(&[total, 520], 1).to_dtype(dtype).unwrap(), weights_of(520, dtype));
        assert_independent_of_threads(|| grouped::forward(&x, &experts(&weights)).unwrap());
    }
}

#[test]
fn wrong_groups_are_refused() {
    let total = ROWS.iter().sum::<usize>();
    let (x, weights) = (random(&[total, 7], 1), weights_of(7, DType::F64));
    let all = experts(&weights);
    let error = message(grouped::forward(&x, &[]));
    assert!(error.contains("no experts"), "{error}");
    let error = message(grouped::forward(&x, &all[1..]));
    assert!(error.contains("the experts have 33 rows, expected those of [34, 7]"), "{error}");
    let error = message(grouped::forward(&random(&[total, 8], 1), &all));
    assert!(error.contains("an expert has weights [(37, 7), (37, 7)]"), "{error}");
    let mut one = all.clone();
    one[3].layers.pop();
    let error = message(grouped::forward(&x, &one));
    assert!(error.contains("[(37, 7)] beside [(37, 7), (37, 7)]"), "{error}");
    let bias = random(&[36], 1);
    let mut one = all.clone();
    one[3].layers[1].bias = Some(&bias);
    let error = message(grouped::forward(&x, &one));
    assert!(error.contains("bias has shape [36], expected [37]"), "{error}");
    let error = message(grouped::backward_input(&[None, None], &all));
    assert!(error.contains("no gradient"), "{error}");
    let dy = random(&[total, 36], 1);
    let error = message(grouped::backward_input(&[Some(&dy), None], &all));
    assert!(error.contains("dy has shape [34, 36], expected [34, 37]"), "{error}");
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use crate::experts::cuda::routed::{OTHER_WAY, Way};
    use crate::glu::{self, Activation};
    use crate::quantized::testing::every_kind;
    use crate::quantized::{E2M1, Levels, Scales};
    use routed::{Expert, Layer, Matrix, Options};

    const WAYS: [Way; 3] = [Way::OneByOne, Way::Tiles(32), Way::Tiles(64)];

    /// A layer's experts and what is asked of them, all on the CPU.
    struct Problem {
        weights: Vec<[Matrix; 3]>,
        biases: Vec<[Option<Tensor>; 3]>,
        x: Tensor,
        logits: Tensor,
        options: Options,
    }

    fn weight_of(matrix: &Matrix) -> Weight<'_> {
        match matrix {
            Matrix::Dense(weight) => weight.into(),
            Matrix::Packed(packed) => packed.into(),
        }
    }

    fn expert_of<'a>(weights: &'a [Matrix; 3], biases: &'a [Option<Tensor>; 3]) -> Expert<'a> {
        Expert {
            weights: weights.each_ref().map(weight_of),
            biases: biases.each_ref().map(Option::as_ref),
        }
    }

    impl Problem {
        fn new([tokens, count, hidden, width]: [usize; 4], options: Options, dtype: DType) -> Self {
            let low = |shape: &[usize], seed| random(shape, seed).to_dtype(dtype).unwrap();
            let weight = |shape: &[usize], seed: usize| {
                let weight = (low(shape, seed as u64) * 0.2).unwrap().to_dtype(dtype).unwrap();
                Matrix::Dense(weight)
            };
            let expert = |index: usize| {
                let seed = 10 * (index + 1);
                let [gate, up] = [1, 2].map(|it| weight(&[width, hidden], seed + it));
                [gate, up, weight(&[hidden, width], seed + 3)]
            };
            let weights = (0..count).map(expert).collect();
            let (x, logits) = (low(&[tokens, hidden], 1), low(&[tokens, count], 2));
            Self { weights, biases: vec![[const { None }; 3]; count], x, logits, options }
        }

        /// With biases, but of some layers.
        fn biased(mut self) -> Self {
            for (index, (weights, biases)) in self.weights.iter().zip(&mut self.biases).enumerate()
            {
                for (layer, (weight, bias)) in weights.iter().zip(biases).enumerate() {
                    let (outer, _) = weight_of(weight).shape().unwrap();
                    let number = random(&[outer], (1000 + 3 * index + layer) as u64);
                    let number = number.to_dtype(self.x.dtype()).unwrap();
                    *bias = (3 * index + layer != 1).then_some(number);
                }
            }
            self
        }

        /// With the matrices into gates and values in one format, and those back in another.
        fn packed(mut self, [into, back]: [Format; 2]) -> Self {
            for weights in &mut self.weights {
                for (weight, format) in weights.iter_mut().zip([into, into, back]) {
                    if let Matrix::Dense(dense) = weight {
                        let dense = dense.to_dtype(DType::F32).unwrap();
                        *weight = Matrix::Packed(quantize(&dense, format).unwrap());
                    }
                }
            }
            self
        }

        /// By the operations for any number of tokens.
        fn on_the_cpu(&self) -> Tensor {
            let Options { active, normalized, activation } = self.options;
            let routes = Routes::new(&self.logits, active, normalized).unwrap();
            let Dispatch { tokens, places, experts } = routes.dispatch();
            let tokens = Tensor::new(tokens, &Device::Cpu).unwrap();
            let rows = self.x.index_select(&tokens, 0).unwrap();
            let group = |layers: &[usize]| {
                let layer = |expert: usize, layer: usize| grouped::Layer {
                    weight: weight_of(&self.weights[expert][layer]),
                    bias: self.biases[expert][layer].as_ref(),
                };
                let expert = |(expert, rows): &(usize, usize)| grouped::Expert {
                    rows: *rows,
                    layers: layers.iter().map(|it| layer(*expert, *it)).collect(),
                };
                experts.iter().map(expert).collect::<Vec<_>>()
            };
            let both = grouped::forward(&rows, &group(&[0, 1])).unwrap();
            let unit = glu::forward(&both[0], &both[1], activation).unwrap();
            let y = grouped::forward(&unit, &group(&[2])).unwrap();
            let places = Tensor::from_vec(places, (routes.tokens(), active), &Device::Cpu).unwrap();
            let weights = routes.weights(self.x.dtype(), &Device::Cpu).unwrap();
            combine(&y[0], &weights, &places).unwrap()
        }

        fn layer(&self, device: &Device) -> Option<Layer> {
            let on_gpu = |matrix: &Matrix| match matrix {
                Matrix::Dense(weight) => Matrix::Dense(there(weight, device)),
                Matrix::Packed(packed) => Matrix::Packed(packed.to_device(device).unwrap()),
            };
            let weights: Vec<_> = self.weights.iter().map(|it| it.each_ref().map(on_gpu)).collect();
            let bias = |bias: &Option<Tensor>| bias.as_ref().map(|bias| there(bias, device));
            let biases: Vec<_> = self.biases.iter().map(|it| it.each_ref().map(bias)).collect();
            let experts: Vec<_> =
                weights.iter().zip(&biases).map(|(it, biases)| expert_of(it, biases)).collect();
            let dtype = self.x.dtype();
            let layer = Layer::new(&experts, dtype).unwrap();
            let most = routed::most_tokens(&experts, dtype).unwrap();
            assert_eq!(layer.as_ref().map(Layer::most_tokens), most);
            if let Some(layer) = &layer {
                assert!(layer.has(&experts, dtype) && !layer.has(&experts[1..], dtype));
                let mut other = experts.clone();
                other[0].biases[2] = biases.last().and_then(|biases| biases[1].as_ref());
                let is_other = other[0].biases[2].is_some() || experts[0].biases[2].is_some();
                assert_eq!(layer.has(&other, dtype), !is_other);
            }
            layer
        }

        fn assert_right(&self, device: &Device, tolerance: f64) {
            let layer = self.layer(device).unwrap();
            for view in [|tensor: &Tensor| tensor.clone(), strided] {
                let on_gpu = |tensor: &Tensor| view(&there(tensor, device));
                let (x, logits) = (on_gpu(&self.x), on_gpu(&self.logits));
                // Of few tokens by all kinds of kernels.
                let is_few = self.x.dim(0).unwrap() <= 64;
                let ways = WAYS.map(Some).into_iter().filter(|_| is_few).chain([None]);
                for way in ways {
                    OTHER_WAY.set(way);
                    let found = layer.forward(&x, &logits, self.options).unwrap();
                    OTHER_WAY.set(None);
                    assert_eq!((found.dtype(), found.dims()), (self.x.dtype(), self.x.dims()));
                    assert_close(&here(&found), &self.on_the_cpu(), tolerance);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_grouped_products_are_those_of_the_cpu() {
        let device = crate::testing::cuda();
        // The second and the third have rows or weights that the kernel doesn't take as they are.
        for (rows, [outer, inner]) in [
            (&[1, 64, 0, 65, 130, 7][..], [136, 200]),
            (&[3, 70], [37, 64]),
            (&[5], [64, 30]),
            (&[200, 1], [8, 8]),
            (&[2, 3, 129], [768, 2048]),
        ] {
            let total = rows.iter().sum::<usize>();
            for (dtype, tolerance) in PRECISIONS {
                let low = |shape: &[usize], seed| random(shape, seed).to_dtype(dtype).unwrap();
                let x = low(&[total, inner], 1);
                let dys = [low(&[total, outer], 2), low(&[total, outer], 3)];
                let weights: Vec<[Tensor; 2]> = (0..rows.len() as u64)
                    .map(|seed| [10, 20].map(|more| low(&[outer, inner], more + seed)))
                    .collect();
                let biases = biases_of(2 * rows.len(), outer, dtype);
                let on = |move_to: &dyn Fn(&Tensor) -> Tensor, has_biases: bool| {
                    let weights: Vec<_> =
                        weights.iter().map(|it| it.each_ref().map(move_to)).collect();
                    let biases: Vec<_> = biases.iter().map(move_to).collect();
                    let groups = rows.iter().zip(&weights).map(|(rows, weights)| grouped::Expert {
                        rows: *rows,
                        layers: weights.each_ref().map(|it| Weight::from(it).into()).to_vec(),
                    });
                    let mut groups: Vec<_> = groups.collect();
                    if has_biases {
                        groups = with_biases(groups, &biases);
                    }
                    groups.retain(|group| group.rows > 0);
                    let mut found = grouped::forward(&move_to(&x), &groups).unwrap();
                    let [first, second] = dys.each_ref().map(move_to);
                    for dys in [[Some(&first), Some(&second)], [None, Some(&second)]] {
                        found.push(grouped::backward_input(&dys, &groups).unwrap());
                    }
                    found
                };
                for has_biases in [false, true] {
                    let expected = on(&|tensor| tensor.clone(), has_biases);
                    for view in [|tensor: &Tensor| tensor.clone(), strided] {
                        let found = on(&|tensor| view(&there(tensor, &device)), has_biases);
                        for (found, expected) in found.iter().zip(&expected) {
                            assert_close(&here(found), expected, 2.0 * tolerance);
                        }
                    }
                }
            }
        }
    }

    const PACKED: [Format; 9] = [
        Format::Nf4 { block: 64, nested: true },
        Format::Mxfp4,
        Format::Q4K,
        Format::Q6K,
        Format::Q8_0,
        Format::Affine { bits: 3, group: 64 },
        Format::Mxfp8,
        Format::Affine { bits: 2, group: 64 },
        Format::Q5K,
    ];

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_grouped_products_by_packed_weights_are_those_of_the_cpu() {
        let device = crate::testing::cuda();
        let total = ROWS.iter().sum::<usize>();
        let dense = weights_of(256, DType::F32);
        for (index, format) in PACKED.into_iter().enumerate() {
            let pack = |weight: &Tensor| {
                // Whole chunks of columns.
                let weight = Tensor::cat(&[weight, &weight.narrow(0, 0, 3).unwrap()], 0).unwrap();
                quantize(&weight, format).unwrap()
            };
            let packed: Vec<_> = dense.iter().map(|it| it.each_ref().map(pack)).collect();
            let (dtype, tolerance) = PRECISIONS[index % PRECISIONS.len()];
            let low = |shape: &[usize], seed| random(shape, seed).to_dtype(dtype).unwrap();
            let (x, dys) = (low(&[total, 256], 1), [low(&[total, 40], 2), low(&[total, 40], 3)]);
            let biases = biases_of(2 * ROWS.len(), 40, dtype);
            let on = |device: &Device| {
                let packed: Vec<_> = packed
                    .iter()
                    .map(|it| it.each_ref().map(|it| it.to_device(device).unwrap()))
                    .collect();
                let biases: Vec<_> = biases.iter().map(|bias| there(bias, device)).collect();
                let groups = with_biases(experts(&packed), &biases);
                let mut found = grouped::forward(&there(&x, device), &groups).unwrap();
                let dys = dys.each_ref().map(|dy| there(dy, device));
                let dys = dys.each_ref().map(Some);
                found.push(grouped::backward_input(&dys, &groups).unwrap());
                found
            };
            for (found, expected) in on(&device).iter().zip(&on(&Device::Cpu)) {
                assert_close(&here(found), expected, 4.0 * tolerance);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_few_tokens_have_the_experts_and_sums_of_many() {
        let device = crate::testing::cuda();
        for (sizes, active) in [
            ([1, 128, 2048, 768], 8),
            ([5, 6, 64, 24], 2),
            ([32, 33, 72, 40], 4),
            ([3, 4, 8, 8], 4),
            ([2, 1000, 16, 8], 1),
        ] {
            for (dtype, tolerance) in PRECISIONS {
                for (normalized, activation) in [
                    (true, Activation::Silu),
                    (false, Activation::GeluTanh),
                    (true, Activation::Clamped),
                ] {
                    let options = Options { active, normalized, activation };
                    let problem = Problem::new(sizes, options, dtype);
                    problem.assert_right(&device, 4.0 * tolerance);
                    problem.biased().assert_right(&device, 4.0 * tolerance);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_many_tokens_have_the_experts_and_sums_of_many() {
        let device = crate::testing::cuda();
        for (sizes, active) in [
            ([33, 6, 64, 24], 2),
            ([200, 128, 256, 768], 8),
            ([700, 33, 72, 40], 4),
            ([64, 4, 8, 8], 4),
            ([1000, 1000, 16, 8], 1),
            ([1500, 2, 136, 200], 1),
        ] {
            for (dtype, tolerance) in
                PRECISIONS.into_iter().filter(|(dtype, _)| *dtype != DType::F32)
            {
                let options = Options { active, normalized: true, activation: Activation::Silu };
                let problem = Problem::new(sizes, options, dtype);
                problem.assert_right(&device, 4.0 * tolerance);
                let options = Options { activation: Activation::Clamped, ..options };
                let problem = Problem { options, ..problem };
                problem.biased().assert_right(&device, 4.0 * tolerance);
            }
        }
        // f32 has no such kernels.
        let options = Options { active: 2, normalized: true, activation: Activation::Silu };
        let single = Problem::new([33, 6, 64, 24], options, DType::F32);
        let layer = single.layer(&device).unwrap();
        let (x, logits) = (there(&single.x, &device), there(&single.logits, &device));
        let error = message(layer.forward(&x, &logits, options));
        assert!(error.contains("expected at most 32 tokens"), "{error}");
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_tokens_read_packed_experts() {
        let device = crate::testing::cuda();
        let precisions = PRECISIONS.into_iter().enumerate();
        for ((index, format), (round, (dtype, tolerance))) in PACKED
            .into_iter()
            .enumerate()
            .flat_map(|it| precisions.clone().map(move |other| (it, other)))
        {
            let options = Options { active: 3, normalized: true, activation: Activation::Clamped };
            // Rows of K quants are whole blocks of 256.
            let has_short_rows = matches!(format, Format::Mxfp4 | Format::Q8_0 | Format::Mxfp8);
            let short = [[20, 5, 96, 160], [300, 7, 32, 416]];
            let of_blocks =
                [[1, 5, 256, 512], [7, 5, 768, 256], [60, 5, 256, 512], [300, 7, 512, 256]];
            for (place, sizes) in of_blocks.into_iter().chain(short).enumerate() {
                let (is_short, is_single) = (place >= of_blocks.len(), dtype == DType::F32);
                // f32 has no kernels for so many; and each is computed in one dtype of 16 bits.
                let is_other = !is_single && place % 2 == round % 2;
                if is_short && !has_short_rows || is_single && sizes[0] > 32 || is_other {
                    continue;
                }
                let back = if is_short { format } else { PACKED[(index + 1) % PACKED.len()] };
                let problem = Problem::new(sizes, options, dtype).packed([format, back]);
                problem.assert_right(&device, 8.0 * tolerance);
                problem.biased().assert_right(&device, 8.0 * tolerance);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_tokens_read_experts_of_every_kind() {
        let device = crate::testing::cuda();
        let options = Options { active: 2, normalized: true, activation: Activation::Clamped };
        let ([hidden, width], count) = ([256, 544], 3);
        // Groups go on from one line to the next.
        let [into, back] = [(2 * count * width, hidden), (count * hidden, width)].map(every_kind);
        for ((name, into), (_, back)) in into.iter().zip(&back) {
            let part = |of: &Quantized, lines: usize, index: usize| {
                Matrix::Packed(
                    of.narrow(0, std::slice::from_ref(&(index * lines..(index + 1) * lines)))
                        .unwrap(),
                )
            };
            for (tokens, (dtype, tolerance)) in [1, 40].into_iter().zip(&PRECISIONS[1..]) {
                let mut problem = Problem::new([tokens, count, hidden, width], options, *dtype);
                problem.x = (&problem.x * 0.1).unwrap();
                for (index, weights) in problem.weights.iter_mut().enumerate() {
                    let [gate, up] = [0, 1].map(|it| part(into, width, 2 * index + it));
                    *weights = [gate, up, part(back, hidden, index)];
                }
                let is_taken = !Weight::from(into).rounds_rows() && !into.multiplies_integers();
                assert_eq!(problem.layer(&device).is_some(), is_taken, "{name}");
                if is_taken {
                    problem.assert_right(&device, 8.0 * tolerance);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_few_tokens_read_groups_of_eight() {
        let device = crate::testing::cuda();
        let options = Options { active: 2, normalized: true, activation: Activation::Silu };
        let mut problem = Problem::new([30, 4, 64, 32], options, DType::BF16);
        for matrix in problem.weights.iter_mut().flatten() {
            let (outer, inner) = weight_of(matrix).shape().unwrap();
            let bytes = |count: usize, seed| {
                let numbers = (random(&[count], seed) * 40.0).unwrap().to_dtype(DType::F32);
                let numbers = numbers.unwrap().to_vec1::<f32>().unwrap();
                let bytes: Vec<u8> =
                    numbers.iter().map(|it| (*it as i32).rem_euclid(256) as u8).collect();
                Tensor::from_vec(bytes, count, &Device::Cpu).unwrap()
            };
            let groups = outer * inner / 8;
            let scales = (random(&[groups], 7) * 0.03).unwrap().to_dtype(DType::F32).unwrap();
            let levels = Levels::Integers { bits: 4, zero: 8 };
            let scales = Scales::Plain { scales, offsets: None };
            let packed =
                Quantized::new((outer, inner), levels, 8, bytes(outer * inner / 2, 3), scales);
            *matrix = Matrix::Packed(packed.unwrap());
        }
        assert_eq!(problem.layer(&device).unwrap().most_tokens(), 32);
        problem.assert_right(&device, 0.03);
    }

    /// Scales above 2 by themselves are beyond what bf16 has once they make up for what codes are too small by.
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_small_scales_beside_large_ones_keep_their_numbers() {
        let device = crate::testing::cuda();
        let options = Options { active: 1, normalized: true, activation: Activation::Silu };
        let [tokens, hidden, width] = [3, 64, 160];
        let mut problem = Problem::new([tokens, 1, hidden, width], options, DType::BF16);
        let packed = |(outer, inner): (usize, usize), exponent: fn(usize) -> u8| {
            let exponents = (0..outer * inner / 32).map(|group| exponent(group * 32 / inner));
            let codes = (0..outer * inner / 2).map(|at| (at * 37 % 251) as u8);
            let [codes, exponents] =
                [codes.collect(), exponents.collect()].map(|bytes: Vec<u8>| {
                    Tensor::from_slice(&bytes, bytes.len(), &Device::Cpu).unwrap()
                });
            let (levels, scales) = (Levels::Table(&E2M1), Scales::E8m0(exponents));
            Matrix::Packed(Quantized::new((outer, inner), levels, 32, codes, scales).unwrap())
        };
        let into = packed((width, hidden), |_| 131);
        // Of neighbouring lines, some far above and others far below 1.
        let back = packed((hidden, width), |line| if line % 4 == 0 { 140 } else { 110 });
        problem.weights = vec![[into.clone(), into, back]];
        let layer = problem.layer(&device).unwrap();
        let (x, logits) = (there(&problem.x, &device), there(&problem.logits, &device));
        let small = |y: &Tensor| {
            let lines: Vec<u32> = (0..hidden as u32).filter(|line| line % 4 != 0).collect();
            let lines = Tensor::new(lines, &Device::Cpu).unwrap();
            y.index_select(&lines, 1).unwrap()
        };
        let expected = small(&problem.on_the_cpu());
        assert!(max_abs(&expected) > 1.0);
        for way in WAYS {
            OTHER_WAY.set(Some(way));
            let found = layer.forward(&x, &logits, options).unwrap();
            OTHER_WAY.set(None);
            assert_close(&small(&here(&found)), &expected, 0.03);
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_equal_logits_choose_the_first_and_nan_shows() {
        let device = crate::testing::cuda();
        let options = Options { active: 3, normalized: true, activation: Activation::Silu };
        let mut problem = Problem::new([2, 70, 16, 8], options, DType::F32);
        let mut logits = vec![1.0f32; 140];
        logits[70 + 40] = f32::NAN;
        problem.logits = Tensor::from_vec(logits, (2, 70), &Device::Cpu).unwrap();
        let on_gpu = |tensor: &Tensor| there(tensor, &device);
        let layer = problem.layer(&device).unwrap();
        let found =
            here(&layer.forward(&on_gpu(&problem.x), &on_gpu(&problem.logits), options).unwrap());
        let expected = problem.on_the_cpu();
        assert_close(&found.get(0).unwrap(), &expected.get(0).unwrap(), 1e-5);
        assert!(values(&found.get(1).unwrap()).iter().all(|value| value.is_nan()));
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_few_tokens_are_refused_where_they_do_not_fit() {
        let device = crate::testing::cuda();
        let options = Options { active: 2, normalized: true, activation: Activation::Silu };
        let problem = Problem::new([2, 4, 16, 8], options, DType::F32);
        let layer = problem.layer(&device).unwrap();
        let (x, logits) = (there(&problem.x, &device), there(&problem.logits, &device));
        let none =
            layer.forward(&x.narrow(0, 0, 0).unwrap(), &logits.narrow(0, 0, 0).unwrap(), options);
        assert_eq!(none.unwrap().dims(), [0, 16]);
        let error = message(layer.forward(&x, &x, options));
        assert!(error.contains("logits has shape [2, 16], expected [2, 4]"), "{error}");
        let error = message(layer.forward(&x, &logits, Options { active: 5, ..options }));
        assert!(error.contains("5 of 4 experts for each of 2 tokens"), "{error}");
        for sizes in [[2, 4, 17, 8], [2, 4, 16, 6]] {
            assert!(Problem::new(sizes, options, DType::F32).layer(&device).is_none());
        }
        // Of one expert in another format than of the others.
        let mut mixed =
            Problem::new([2, 4, 256, 256], options, DType::F32).packed([Format::Q4K, Format::Q8_0]);
        let other = Problem::new([2, 4, 256, 256], options, DType::F32)
            .packed([Format::Mxfp4, Format::Q8_0]);
        mixed.weights[2] = other.weights[2].clone();
        assert!(mixed.layer(&device).is_none());
    }

    /// `cargo test --release … cuda_time_of_routed_experts -- --ignored --nocapture`
    #[test]
    #[ignore = "needs an NVIDIA GPU, and is a measurement"]
    fn cuda_time_of_routed_experts() {
        let device = crate::testing::cuda();
        for (name, [count, active, hidden, width], format) in [
            ("gpt-oss-20b, mxfp4", [32, 4, 2880, 2880], Some(Format::Mxfp4)),
            ("gpt-oss-20b, mlx4", [32, 4, 2880, 2880], Some(Format::Affine { bits: 4, group: 64 })),
            ("gpt-oss-20b, bf16", [32, 4, 2880, 2880], None),
            ("qwen3-30b-a3b, q4_k", [128, 8, 2048, 768], Some(Format::Q4K)),
            ("qwen3-30b-a3b, bf16", [128, 8, 2048, 768], None),
        ] {
            let matrix = |outer: usize, inner: usize, seed: u64| {
                let numbers = random(&[outer, inner], seed).to_dtype(DType::F32).unwrap();
                match format {
                    Some(format) => Matrix::Packed(quantize(&numbers, format).unwrap()),
                    None => Matrix::Dense(numbers.to_dtype(DType::BF16).unwrap()),
                }
            };
            let of_one =
                [matrix(width, hidden, 1), matrix(width, hidden, 2), matrix(hidden, width, 3)];
            let copies: Vec<_> = (0..count)
                .map(|_| {
                    of_one.each_ref().map(|matrix| match matrix {
                        Matrix::Dense(weight) => Matrix::Dense(there(weight, &device)),
                        Matrix::Packed(it) => Matrix::Packed(it.to_device(&device).unwrap()),
                    })
                })
                .collect();
            let none = [const { None }; 3];
            let experts: Vec<_> = copies.iter().map(|weights| expert_of(weights, &none)).collect();
            let layer = Layer::new(&experts, DType::BF16).unwrap().unwrap();
            let options = Options { active, normalized: true, activation: Activation::Silu };
            let mut line = format!("{name}, us one by one, in tiles of 32 and of 64:");
            for tokens in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192] {
                let x = random(&[tokens, hidden], 4).to_dtype(DType::BF16).unwrap();
                let logits = random(&[tokens, count], 5).to_dtype(DType::BF16).unwrap();
                let (x, logits) = (there(&x, &device), there(&logits, &device));
                let time = |way: Way| {
                    OTHER_WAY.set(Some(way));
                    let seconds = least_seconds(&device, 5, || {
                        for _ in 0..5 {
                            layer.forward(&x, &logits, options).unwrap();
                        }
                    });
                    OTHER_WAY.set(None);
                    seconds / 5.0 * 1e6
                };
                let times = WAYS.map(|way| match way {
                    Way::OneByOne if tokens > 128 => f64::NAN,
                    _ => time(way),
                });
                line += &format!(" {tokens}: {times:.0?};");
            }
            println!("{line}");
        }
    }
}
