-- Macro: the difference that matters, 1 %. Times are compared by their logarithms, so a difference
-- of 0.01 is 1 %.
create or replace macro margin() as ln(1.01);

-- Macro: the assumed difference of two equal runs, where too few were measured to know it.
create or replace macro assumed_difference() as 0.018;

-- Macro: the standard deviation of a ratio between sessions, beyond the noise of its runs.
create or replace macro session_deviation() as 0.003;

-- Macro: the standard error of a mean of `n_pairs` differences of variance `variance` in
-- `n_sessions` sessions. `equal_variance`, of equal runs, has the weight of four more observations.
create or replace macro standard_error(n_pairs, n_sessions, variance, equal_variance) as sqrt(
    (4 * equal_variance + (n_pairs - 1) * variance) / (n_pairs + 3) / n_pairs
    + session_deviation() ** 2 / n_sessions
);

-- Macro: Student's quantile at 97.5 %, by Cornish and Fisher's expansion: right to 0.04 % from four
-- degrees of freedom on.
create or replace macro student_quantile(degrees) as
1.959964
+ 2.372271 / degrees
+ 2.822499 / degrees ** 2
+ 2.555850 / degrees ** 3
+ 1.589534 / degrees ** 4;

-- Macro: Student's quantile at 95 %, by the same expansion, right to 0.02 % from four degrees on.
-- It makes intervals of 90 %: two one-sided tests at 5 % reject all that lies outside of one.
create or replace macro student_quantile_95(degrees) as
1.644854
+ 1.523770 / degrees
+ 1.420203 / degrees ** 2
+ 0.983002 / degrees ** 3
+ 0.433876 / degrees ** 4;

-- Macro: the probability that Student's t exceeds `x`, for a whole number of `degrees` from 2 on.
--
-- It is (1 − A) / 2 with θ = atan(x / √degrees). For even degrees A = sin θ · Σ cₖ cos²ᵏ θ over k <
-- degrees / 2, cₖ = Γ(k + ½) / (√π k!). For odd ones A = 2/π · (θ + sin θ · Σ cₖ cos²ᵏ⁺¹ θ) over k
-- < (degrees − 1) / 2, cₖ = √π k! / (2 Γ(k + 3/2)).
create or replace macro student_tail(x, degrees) as
0.5 - case
    when degrees % 2 = 0
        then
            sin(atan(x / sqrt(degrees))) * list_sum([
                exp(lgamma(k + 0.5) - lgamma(k + 1)) * cos(atan(x / sqrt(degrees))) ** (2 * k)
                for k in range(degrees // 2)
            ]) / sqrt(pi())
    else
        (
            atan(x / sqrt(degrees)) * 2 + sin(atan(x / sqrt(degrees))) * list_sum([
                exp(lgamma(k + 1) - lgamma(k + 1.5)) * cos(atan(x / sqrt(degrees))) ** (2 * k + 1)
                for k in range((degrees - 1) // 2)
            ]) * sqrt(pi())
        ) / pi()
end / 2;
