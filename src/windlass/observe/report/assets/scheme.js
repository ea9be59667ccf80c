"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const choices = ["auto", "light", "dark"];
  let choice = 0;
  const paint = () => {
    root.dataset.scheme = choice ? choices[choice] : dark.matches ? "dark" : "light";
  };
  const button = document.getElementById("scheme");
  button.addEventListener("click", () => {
    choice = (choice + 1) % choices.length;
    button.textContent = `colours: ${choices[choice]}`;
    paint();
  });
  dark.addEventListener("change", paint);
  paint();
})();
