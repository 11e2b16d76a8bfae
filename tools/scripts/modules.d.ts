// What the pages find in a browser: modules and a function of NiceGUI, and uPlot in the folder vendor.
declare module "nicegui-echart";
declare module "uPlot";
declare module "vue";
declare function setDark(isDark: boolean | null): void;

/** Options of a component of Vue; its methods find what they need in `this`. */
type Component = { [option: string]: any } & ThisType<any>;
