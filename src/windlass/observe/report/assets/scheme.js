"use strict";
// Scheme: the system's, unless the reader chooses; paper is always light.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const choices = ["auto", "light", "dark"];
  let choice = 0;
  let printing = false;
  const paint = () => {
    const is = printing || choice === 1 ? "light" : choice === 2 ? "dark" : dark.matches ? "dark" : "light";
    document.documentElement.dataset.scheme = is;
    dispatchEvent(new Event("scheme"));
  };
  const print = (now) => { printing = now; paint(); };
  const button = document.getElementById("scheme");
  button.addEventListener("click", () => {
    choice = (choice + 1) % choices.length;
    button.textContent = `colours: ${choices[choice]}`;
    paint();
  });
  dark.addEventListener("change", paint);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  paint();
})();
