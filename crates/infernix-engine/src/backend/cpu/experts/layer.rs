//! An expert layer: columns grouped by expert, three passes of tasks (gate and up, hidden, down), and the sum by rank.

use super::super::cells::Cells;
use super::super::elementwise;
use super::super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::super::linear::lanes::{self, Exact, Quantised};
use super::super::linear::{Kind, Rows};
use super::super::num::{bf16_of, sigmoid};
use super::super::pool::Pool;
use super::super::weights::{CpuExperts, Store};
use super::a4::{self, A4};
use super::chain::{self, Column, LANES, Panel};
use crate::backend::Activation;
use crate::numerics::w4a4::{self, Scale};
use infernix_formats::expert_bank::ExpertMatrix;
use std::collections::HashMap;

/// 16-row groups a task takes, so that it reads some 100 KB of weights at the real shapes.
const GROUPS: usize = 4;

/// Experts that a call uses, with their columns.
struct Used {
    expert: usize,
    /// Rows of the call.
    rows: Vec<usize>,
    /// First of its columns among all columns.
    first: usize,
}

/// One expert layer.
pub(crate) struct Layer<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) isa: Isa,
    pub(crate) store: &'a CpuExperts,
    /// Chosen experts and weights by row, rank order.
    pub(crate) routing: &'a [Vec<(u32, f32)>],
    /// `[T, H]`.
    pub(crate) x: &'a [u16],
}

/// Activation columns in the form the arithmetic wants.
enum Inputs {
    /// Quantised columns.
    A4(Vec<A4>),
    /// Swapped pairs of each column, padded for row-major matrices.
    Pairs(Vec<Vec<u32>>),
    /// int8 columns for the processor's byte dot products.
    #[cfg(target_arch = "x86_64")]
    Int8(Vec<Quantised>),
    /// int8 columns for codes that are no small integers.
    #[cfg(target_arch = "x86_64")]
    Exact(Vec<Exact>),
    /// Portable columns.
    Columns(Vec<Column>),
}

impl Layer<'_> {
    /// `acc = fma(w_r, y_r, acc)` by rank, then the shared expert with `sigma(logit)`, rounded once to BF16.
    pub(crate) fn run(&self, shared: &[u16], shared_logit: &[f32], out: &mut [u16]) {
        let h = self.store.spec.hidden;
        let (used, column_of) = self.group();
        let columns = column_of.iter().map(Vec::len).sum::<usize>();
        let mut hidden = vec![0u16; columns * self.store.spec.intermediate];
        self.gate_up(&used, &mut hidden);
        let mut y = vec![0u16; columns * h];
        self.down(&used, &hidden, &mut y);
        let out = Cells::new(out);
        self.pool.chunks(self.routing.len(), 1, |rows| {
            let mut acc = vec![0f32; h];
            for t in rows {
                acc.fill(0.0);
                for ((_, w), c) in self.routing[t].iter().zip(&column_of[t]) {
                    elementwise::accumulate(self.isa, *w, &y[c * h..(c + 1) * h], &mut acc);
                }
                elementwise::accumulate(
                    self.isa,
                    sigmoid(shared_logit[t]),
                    &shared[t * h..(t + 1) * h],
                    &mut acc,
                );
                // SAFETY: each row belongs to one task.
                elementwise::narrow(self.isa, &acc, unsafe { out.piece(t * h..(t + 1) * h) });
            }
        });
    }

    /// Experts in rising order with their rows, and each row's columns by rank.
    fn group(&self) -> (Vec<Used>, Vec<Vec<usize>>) {
        let mut by_expert: Vec<Vec<(usize, usize)>> = vec![Vec::new(); self.store.spec.experts];
        for (t, row) in self.routing.iter().enumerate() {
            row.iter().enumerate().for_each(|(rank, (e, _))| by_expert[*e as usize].push((t, rank)));
        }
        let mut column_of: Vec<Vec<usize>> = self.routing.iter().map(|r| vec![0; r.len()]).collect();
        let (mut used, mut first) = (Vec::new(), 0);
        for (expert, rows) in by_expert.into_iter().enumerate().filter(|(_, r)| !r.is_empty()) {
            for (c, (t, rank)) in rows.iter().enumerate() {
                column_of[*t][*rank] = first + c;
            }
            let n = rows.len();
            used.push(Used { expert, rows: rows.into_iter().map(|r| r.0).collect(), first });
            first += n;
        }
        (used, column_of)
    }

    fn scale(&self, value: f32) -> Scale {
        match self.store.store {
            Store::Rg16 { divisor: true, .. } => Scale::Divisor(value),
            _ => Scale::Multiplier(value),
        }
    }

    fn input_scale(&self, expert: usize, matrix: ExpertMatrix) -> Scale {
        // Present wherever the activation is A4: checked when the experts were taken.
        let g = self.store.spec.input_scales.as_ref().map_or(1.0, |s| s[expert][matrix.index()]);
        self.scale(g)
    }

    fn is_a4(&self) -> bool {
        self.store.spec.activation == Activation::A4
    }

    /// Storage of all matrices.
    fn kinds(&self) -> impl Iterator<Item = Kind> {
        match &self.store.store {
            Store::Rg16 { .. } => vec![Kind::Nvfp4Mul],
            Store::Parents { gate_up, down } => gate_up.kinds().chain(down.kinds()).collect(),
            // Records are alike.
            Store::Fp8 { .. } | Store::Ggml { .. } => {
                let matrices = [ExpertMatrix::Gate, ExpertMatrix::Up, ExpertMatrix::Down];
                matrices.iter().flat_map(|m| self.store.matrix(0, *m)).map(|r| r.kind()).collect::<Vec<_>>()
            }
        }
        .into_iter()
    }

    /// Wide activations of `columns` columns of `k` values.
    fn wide(&self, x: &[u16], k: usize) -> Inputs {
        let columns = x.chunks_exact(k);
        if self.store.spec.activation == Activation::A8 {
            #[cfg(target_arch = "x86_64")]
            if self.isa == Isa::Avx512Bf16 && self.kinds().all(Kind::integers) {
                return Inputs::Int8(columns.map(|x| Quantised::new(self.isa, x)).collect());
            }
            #[cfg(target_arch = "x86_64")]
            if self.isa == Isa::Avx512Bf16 && self.kinds().all(lanes::takes) {
                return Inputs::Exact(columns.map(|x| Exact::new(self.isa, x)).collect());
            }
            return Inputs::Columns(columns.map(Column::int8).collect());
        }
        // Below 2^-90 the processor's dot product could flush a product (see `linear`): the portable chain cannot.
        let tiny = |v: &u16| v & 0x7fff != 0 && (v >> 7) & 0xff < 127 - 90;
        #[cfg(target_arch = "x86_64")]
        if self.isa == Isa::Avx512Bf16 && self.kinds().all(lanes::takes) && !x.iter().any(tiny) {
            let bank = matches!(self.store.store, Store::Rg16 { .. });
            let pairs = |x: &[u16]| {
                let mut out = Vec::with_capacity(lanes::pairs(k));
                chain::swapped(x, &mut out);
                if !bank {
                    out.resize(lanes::pairs(k), 0);
                }
                out
            };
            return Inputs::Pairs(columns.map(pairs).collect());
        }
        Inputs::Columns(columns.map(Column::wide).collect())
    }

    /// `h = bf16(silu(bf16(gate x)) bf16(up x))` of all columns, `[columns, I]`.
    fn gate_up(&self, used: &[Used], hidden: &mut [u16]) {
        let (h, i) = (self.store.spec.hidden, self.store.spec.intermediate);
        if !matches!(self.store.store, Store::Rg16 { .. }) {
            return self.gate_up_rows(used, hidden);
        }
        // Operands of the call's rows; 4-bit ones depend on the expert's scale, and equal scales share them.
        let mut keys: HashMap<(usize, u32), usize> = HashMap::new();
        let mut jobs: Vec<(usize, Scale)> = Vec::new();
        let mut index = |t: usize, s: Scale| {
            let (Scale::Multiplier(g) | Scale::Divisor(g)) = s;
            *keys.entry((t, g.to_bits())).or_insert_with(|| {
                jobs.push((t, s));
                jobs.len() - 1
            })
        };
        let mut operands: Vec<[Vec<usize>; 2]> = Vec::with_capacity(used.len());
        let inputs = if self.is_a4() {
            for u in used {
                let scales = [ExpertMatrix::Gate, ExpertMatrix::Up].map(|m| self.input_scale(u.expert, m));
                operands.push(scales.map(|s| u.rows.iter().map(|t| index(*t, s)).collect()));
            }
            let done = self.quantise(&jobs, self.x, h);
            Inputs::A4(done)
        } else {
            operands.extend(used.iter().map(|u| [u.rows.clone(), u.rows.clone()]));
            self.wide(self.x, h)
        };
        let groups = 2 * i / 16;
        let tasks = groups.div_ceil(GROUPS);
        let hidden = Cells::new(hidden);
        self.pool.run(used.len() * tasks, |task| {
            let (u, ops) = (&used[task / tasks], &operands[task / tasks]);
            let Some((units, _)) = self.store.units(u.expert) else { return };
            let bytes = h / 16 * super::UNIT;
            let factors = [ExpertMatrix::Gate, ExpertMatrix::Up].map(|m| self.factor(u.expert, m));
            let first = task % tasks * GROUPS;
            for g in first..(first + GROUPS).min(groups) {
                let units = &units[g * bytes..(g + 1) * bytes];
                // Even lanes are gate rows, odd lanes up rows.
                let gate = self.products(units, &inputs, &ops[0], factors[0]);
                let up: Vec<_> = if ops[0] != ops[1] {
                    self.products(units, &inputs, &ops[1], factors[1])
                } else if factors[0] != factors[1] {
                    gate.iter().map(|(raw, _)| (*raw, raw.finish(factors[1]))).collect()
                } else {
                    gate.clone()
                };
                for (c, (gate, up)) in gate.iter().zip(&up).enumerate() {
                    let at = (u.first + c) * i + 8 * g;
                    let even: [u16; 8] = std::array::from_fn(|r| gate.1[2 * r]);
                    let odd: [u16; 8] = std::array::from_fn(|r| up.1[2 * r + 1]);
                    // SAFETY: rows 8g..8g+8 of the column belong to this task.
                    a4::swiglu(self.isa, &even, &odd, unsafe { hidden.piece(at..at + 8) });
                }
            }
        });
    }

    fn factor(&self, expert: usize, matrix: ExpertMatrix) -> Scale {
        let w = self.scale(self.store.globals(expert)[matrix.index()]);
        if self.is_a4() { w4a4::combine(w, self.input_scale(expert, matrix)) } else { w }
    }

    fn quantise(&self, jobs: &[(usize, Scale)], x: &[u16], k: usize) -> Vec<A4> {
        let mut done: Vec<A4> = vec![A4::default(); jobs.len()];
        let cells = Cells::new(&mut done);
        self.pool.chunks(jobs.len(), self.pool.share(jobs.len(), 1), |range| {
            for j in range {
                let (t, s) = jobs[j];
                // SAFETY: each job belongs to one task.
                unsafe { cells.piece(j..j + 1)[0] = A4::new(self.isa, &x[t * k..(t + 1) * k], s) };
            }
        });
        done
    }

    /// Products of 16 rows with the named columns.
    fn products(
        &self,
        units: &[u8],
        inputs: &Inputs,
        columns: &[usize],
        factor: Scale,
    ) -> Vec<(Raw, [u16; LANES])> {
        let raw: Vec<Raw> = match inputs {
            Inputs::A4(x) => {
                let x: Vec<&A4> = columns.iter().map(|c| &x[*c]).collect();
                let mut out = vec![[0i64; LANES]; x.len()];
                a4::sums(self.isa, units, &x, &mut out);
                out.into_iter().map(Raw::Integer).collect()
            }
            Inputs::Pairs(x) => {
                let x: Vec<&[u32]> = columns.iter().map(|c| x[*c].as_slice()).collect();
                let mut out = vec![[0f32; LANES]; x.len()];
                #[cfg(target_arch = "x86_64")]
                chain::rg16(units, &x, &mut out);
                out.into_iter().map(Raw::Real).collect()
            }
            #[cfg(target_arch = "x86_64")]
            Inputs::Int8(x) => {
                let x: Vec<&Quantised> = columns.iter().map(|c| &x[*c]).collect();
                let mut out = vec![[0f32; LANES]; x.len()];
                chain::rg16_int8(units, &x, &mut out);
                out.into_iter().map(Raw::Real).collect()
            }
            // Banks of 16-row groups hold small integers.
            #[cfg(target_arch = "x86_64")]
            Inputs::Exact(_) => Vec::new(),
            Inputs::Columns(x) => {
                let x: Vec<&Column> = columns.iter().map(|c| &x[*c]).collect();
                let mut out = vec![[0f32; LANES]; x.len()];
                let mut panel = Panel::default();
                panel.fill_rg16(units);
                panel.products(self.isa, &x, &mut out);
                out.into_iter().map(Raw::Real).collect()
            }
        };
        raw.into_iter().map(|r| (r, r.finish(factor))).collect()
    }

    /// `y = bf16(down h)` of all columns, `[columns, H]`.
    fn down(&self, used: &[Used], hidden: &[u16], y: &mut [u16]) {
        let (h, i) = (self.store.spec.hidden, self.store.spec.intermediate);
        if !matches!(self.store.store, Store::Rg16 { .. }) {
            let matrices: Vec<_> =
                used.iter().map(|u| (u, self.store.matrix(u.expert, ExpertMatrix::Down))).collect();
            let columns: Vec<Vec<usize>> =
                used.iter().map(|u| (u.first..u.first + u.rows.len()).collect()).collect();
            let inputs = self.wide(hidden, i);
            self.row_major(&matrices, &columns, &inputs, h, y);
            return;
        }
        let inputs = if self.is_a4() {
            let jobs: Vec<(usize, Scale)> = used
                .iter()
                .flat_map(|u| {
                    let s = self.input_scale(u.expert, ExpertMatrix::Down);
                    (u.first..u.first + u.rows.len()).map(move |c| (c, s))
                })
                .collect();
            Inputs::A4(self.quantise(&jobs, hidden, i))
        } else {
            self.wide(hidden, i)
        };
        let groups = h / 16;
        // Rows are short here: twice as many groups make as many bytes.
        let step = 2 * GROUPS;
        let tasks = groups.div_ceil(step);
        let y = Cells::new(y);
        self.pool.run(used.len() * tasks, |task| {
            let u = &used[task / tasks];
            let Some((_, units)) = self.store.units(u.expert) else { return };
            let bytes = i / 16 * super::UNIT;
            let factor = self.factor(u.expert, ExpertMatrix::Down);
            let columns: Vec<usize> = (u.first..u.first + u.rows.len()).collect();
            let first = task % tasks * step;
            for g in first..(first + step).min(groups) {
                let units = &units[g * bytes..(g + 1) * bytes];
                for (c, (_, v)) in columns.iter().zip(self.products(units, &inputs, &columns, factor)) {
                    let at = c * h + 16 * g;
                    // SAFETY: rows 16g..16g+16 of the column belong to this task.
                    unsafe { y.piece(at..at + 16) }.copy_from_slice(&v);
                }
            }
        });
    }

    fn gate_up_rows(&self, used: &[Used], hidden: &mut [u16]) {
        let (h, i) = (self.store.spec.hidden, self.store.spec.intermediate);
        let inputs = self.wide(self.x, h);
        let columns: Vec<Vec<usize>> = used.iter().map(|u| u.rows.clone()).collect();
        let mut sides = [vec![0u16; hidden.len()], vec![0u16; hidden.len()]];
        for (side, m) in sides.iter_mut().zip([ExpertMatrix::Gate, ExpertMatrix::Up]) {
            let matrices: Vec<_> = used.iter().map(|u| (u, self.store.matrix(u.expert, m))).collect();
            self.row_major(&matrices, &columns, &inputs, i, side);
        }
        let cells = Cells::new(hidden);
        self.pool.chunks(sides[0].len() / i, 4, |c| {
            let r = c.start * i..c.end * i;
            // SAFETY: each column belongs to one task.
            a4::swiglu(self.isa, &sides[0][r.clone()], &sides[1][r.clone()], unsafe { cells.piece(r) });
        });
    }

    /// Row-major matrices times their columns: 16 rows a task.
    fn row_major(
        &self,
        matrices: &[(&Used, Vec<Rows<'_>>)],
        columns: &[Vec<usize>],
        inputs: &Inputs,
        n: usize,
        y: &mut [u16],
    ) {
        let mut tasks = Vec::new();
        for (m, (_, parts)) in matrices.iter().enumerate() {
            let mut offset = 0;
            for (p, part) in parts.iter().enumerate() {
                tasks.extend((0..part.n()).step_by(LANES).map(|r| (m, p, r, offset)));
                offset += part.n();
            }
        }
        let y = Cells::new(y);
        self.pool.run(tasks.len(), |task| {
            let (m, p, first, offset) = tasks[task];
            let (used, parts) = &matrices[m];
            let w = &parts[p];
            let columns = &columns[m];
            let mut out = vec![[0f32; LANES]; columns.len()];
            match inputs {
                #[cfg(target_arch = "x86_64")]
                Inputs::Pairs(x) => {
                    let x: Vec<&[u32]> = columns.iter().map(|c| x[*c].as_slice()).collect();
                    lanes::wide(w, first, &x, &mut out);
                }
                #[cfg(target_arch = "x86_64")]
                Inputs::Int8(x) => {
                    let x: Vec<&Quantised> = columns.iter().map(|c| &x[*c]).collect();
                    lanes::int8(w, first, &x, &mut out);
                }
                #[cfg(target_arch = "x86_64")]
                Inputs::Exact(x) => {
                    let x: Vec<&Exact> = columns.iter().map(|c| &x[*c]).collect();
                    lanes::exact(w, first, &x, &mut out);
                }
                Inputs::Columns(x) => {
                    let x: Vec<&Column> = columns.iter().map(|c| &x[*c]).collect();
                    let mut panel = Panel::default();
                    panel.fill(self.isa, w, first);
                    panel.products(self.isa, &x, &mut out);
                }
                // 4-bit activations are of banks alone.
                _ => return,
            }
            for (c, v) in out.iter().enumerate() {
                let rows = LANES.min(w.n() - first);
                let at = (used.first + c) * n + offset + first;
                // SAFETY: these rows of the column belong to this task.
                let to = unsafe { y.piece(at..at + rows) };
                for (r, to) in to.iter_mut().enumerate() {
                    *to = bf16_of(w.finish(first + r, v[r]));
                }
            }
        });
    }
}

/// Products before the matrix's own scale.
#[derive(Clone, Copy)]
enum Raw {
    Integer([i64; LANES]),
    Real([f32; LANES]),
}

impl Raw {
    fn finish(self, factor: Scale) -> [u16; LANES] {
        match self {
            Raw::Integer(s) => s.map(|s| bf16_of(w4a4::finish(s, factor))),
            Raw::Real(y) => y.map(|y| {
                bf16_of(match factor {
                    Scale::Multiplier(m) => y * m,
                    Scale::Divisor(d) => y / d,
                })
            }),
        }
    }
}
